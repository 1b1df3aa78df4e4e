"""Sandboxes that see this machine's files, and change none: a layer of their own lies over them.

They are mount and process namespaces with a chroot; the network is this machine's. No engine is
asked for, no image is made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tracegrad.runner.agent_layer import AgentLayer
from tracegrad.runner.local_process import run_process
from tracegrad.runner.outcomes import ProcessEnd
from tracegrad.runner.sandbox import BrokenEnvironment, SandboxSpec

_HOLD = """
mount -t overlay overlay -o lowerdir=/,upperdir="$1/upper",workdir="$1/work" "$1/root"
mount --rbind /dev "$1/root/dev"
mount -t proc proc "$1/root/proc"
mount -t tmpfs tmpfs "$1/root/tmp"
echo up
exec sleep infinity
"""
_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class OverlaySandbox:
    shares_files = False

    def __init__(self, folder: Path, workdir: str) -> None:
        self.folder, self._folder = workdir, folder
        for part in ("upper", "work", "root"):
            (folder / part).mkdir()
        self._holder = subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "sh",
                "-ec",
                _HOLD,
                "sh",
                folder,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "up\n":
            raise BrokenEnvironment("this machine has no overlay, or forbids namespaces")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self._init = int(children.read_text())
        self._enter = ["nsenter", "-t", str(self._init), "-m", "-p", "chroot", f"{folder}/root"]
        self._inside(workdir).mkdir(parents=True, exist_ok=True)

    def reachable(self, url: str) -> str:
        return url

    async def run(
        self,
        command: Sequence[str] | str,
        *,
        environ: Mapping[str, str | None],
        timeout_s: float | None,
        output: Path,
        marker: str,
        echo: Callable[[bytes], object] | None = None,
    ) -> ProcessEnd:
        words = ["sh", "-c", command] if isinstance(command, str) else [*command]
        own = {"PATH": PATH, "HOME": "/root", **environ}
        return await run_process(
            [*self._enter, "sh", "-c", 'cd "$0" && exec "$@"', self.folder, *words],
            folder=Path("/"),
            environ={name: value for name, value in own.items() if value is not None},
            timeout_s=timeout_s,
            output=output,
            marker=marker,
            echo=echo,
        )

    async def upload(self, source: Path, target: str) -> None:
        _copy(source, self._inside(os.path.join(self.folder, target)))

    def link(self, source: Path, target: str) -> None:
        place = self._inside(target)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(source)

    async def download(self, source: str, target: Path) -> None:
        inside = self._inside(os.path.join(self.folder, source))
        if not inside.exists():
            raise FileNotFoundError(source)
        _copy(inside, target)

    async def close(self) -> None:
        if self._holder.poll() is None:
            self._holder.kill()
            self._holder.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _inside(self, path: str) -> Path:
        return Path(f"/proc/{self._init}/root{self._folder}/root{path}")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


class OverlaySandboxes:
    """`layers`: what is baked in, by the recipe's id."""

    def __init__(self, folder: Path, layers: Mapping[str, AgentLayer]) -> None:
        self._folder, self._layers = folder, layers
        self.started = 0

    async def start(self, spec: SandboxSpec) -> OverlaySandbox:
        self.started += 1
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        sandbox = OverlaySandbox(folder, spec.workdir or "/app")
        if spec.recipe is not None:
            await self._bake(sandbox, self._layers[spec.recipe])
        return sandbox

    async def _bake(self, sandbox: OverlaySandbox, layer: AgentLayer) -> None:
        # In place of copies: these files are seen inside, too, and what is changed is a copy then.
        for inside, source in layer.files.items():
            sandbox.link(source, inside)
        log = self._folder / "bake.log"
        end = await sandbox.run(
            ["sh", "-ec", "\n".join(layer.lines)],
            environ={"BAKE": "this"},
            timeout_s=None,
            output=log,
            marker="BAKE=this",
        )
        if end.exit_code != 0:
            raise BrokenEnvironment(log.read_text())

    async def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
