"""A sandbox that is a container: commands, files, snapshots.

Its first process only sleeps, as root: signals from inside do not reach it, so an agent cannot end
its own container. Commands run beside it (`docker_exec.py`).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from docker.errors import APIError

from tracegrad.runner.container_files import ContainerFiles
from tracegrad.runner.container_network import Addresses
from tracegrad.runner.docker_engine import explanation
from tracegrad.runner.docker_exec import ExecTarget, run_in_container
from tracegrad.runner.docker_images import SandboxImage, commit
from tracegrad.runner.outcomes import ProcessEnd
from tracegrad.runner.sandbox import (
    BrokenEnvironment,
    SandboxSpec,
    SandboxUnavailable,
    Snapshot,
)
from tracegrad.runner.tar_stream import FileOwner

MIRROR_VARIABLE = "TRACEGRAD_MIRROR"
_RESET_S = 60.0
_EMPTY_FOLDER = 'cd "$1" && for each in * .[!.]* ..?*; do rm -rf -- "$each"; done'


class DockerSandbox:
    """One container.

    Args:
        owner: of files that are copied in.
        remove: ends and removes it.
        snapshot_labels, remove_snapshot: of images that are made of it.
    """

    shares_files = False
    temp = "/tmp"  # also where all else is read-only

    def __init__(
        self,
        target: ExecTarget,
        *,
        spec: SandboxSpec,
        image: SandboxImage,
        files: ContainerFiles,
        owner: FileOwner,
        addresses: Addresses,
        remove: Callable[[DockerSandbox], Awaitable[None]],
        snapshot_labels: Mapping[str, str],
        remove_snapshot: Callable[[str], Awaitable[None]],
    ) -> None:
        self.on_close: Callable[[], Awaitable[None]] | None = None
        self.container = target.container
        self._target, self._spec, self._image, self._files = target, spec, image, files
        self._owner = owner
        self._addresses, self._remove = addresses, remove
        self._snapshot_labels, self._remove_snapshot = snapshot_labels, remove_snapshot
        self._one_at_a_time = asyncio.Lock()
        self._destroying: asyncio.Task[None] | None = None

    @property
    def folder(self) -> str:
        return self._target.workdir

    def reachable(self, url: str) -> str:
        """Raises ValueError: it cannot be reached."""
        return self._addresses.reachable(url)

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
        """Whatever its `marker`, all that runs in the container ends with it."""
        if self._spec.mirror is not None:
            environ = {MIRROR_VARIABLE: self.reachable(self._spec.mirror), **environ}
        async with self._one_at_a_time:
            if not self._spec.read_only:  # else it is a volume
                # An agent may have removed it, and is scored all the same.
                await self._files.make(self.folder)
            return await run_in_container(
                self._target,
                command,
                environ=environ,
                timeout_s=timeout_s,
                output=output,
                echo=echo,
            )

    async def upload(self, source: Path, target: str) -> None:
        await self._files.upload(source, target)

    async def download(self, source: str, target: Path) -> None:
        """Links are not taken. Raises OSError: more than a gibibyte."""
        await self._files.download(source, target)

    async def snapshot(self) -> Snapshot:
        """As an image. Raises SandboxError."""
        engine = self._target.engine
        try:
            found = await engine.call(engine.api.inspect_container, self.container)
            if volumes := [each["Destination"] for each in found["Mounts"]]:
                why = "read_only" if self._spec.read_only else "the image's VOLUME"
                raise BrokenEnvironment(
                    f"{why}: what is written to {', '.join(sorted(volumes))} is in no snapshot;"
                    " leave it out"
                )
            made = await commit(engine, self.container, self._image, self._snapshot_labels)
        except APIError as error:
            raise SandboxUnavailable(f"no snapshot: {explanation(error)}") from None
        spec = replace(
            self._spec, image=made, build=None, recipe=None, workspace=None, workdir=self.folder
        )
        return Snapshot(spec, partial(self._remove_snapshot, made))

    async def alive(self) -> bool:
        try:
            found = await self._target.engine.call(
                self._target.engine.api.inspect_container, self.container
            )
        except (APIError, SandboxUnavailable):
            return False
        return bool(found["State"]["Running"]) and not found["State"]["Paused"]

    async def prepare(self) -> None:
        """Before it is handed out: its folder, and what is in it. Raises SandboxError."""
        made = self.folder != self._image.workdir
        if not self._owner.is_root and (made or self._spec.user is not None):
            if self._spec.read_only:  # a volume
                whose = f"{self._owner.uid}:{self._owner.gid}"
                await self._as_root(["chown", whose, self.folder])
            else:
                await self._files.own(self.folder)
        if self._spec.workspace is not None:
            await self.upload(self._spec.workspace, ".")

    async def reset(self) -> None:
        """Its folder and /tmp as they began; the rest is what `resettable` promises."""
        await self._target.processes.end()
        emptied = ["/tmp"] if self._spec.workspace is None else ["/tmp", self.folder]
        for folder in emptied:
            await self._as_root(["/bin/sh", "-c", _EMPTY_FOLDER, "sh", folder])
        await self.prepare()

    async def close(self) -> None:
        await (self.destroy() if self.on_close is None else self.on_close())

    async def destroy(self) -> None:
        """Its end, also where whoever waits for it is cancelled; may be called again."""
        if self._destroying is None:
            self._destroying = asyncio.create_task(self._destroy())
        await asyncio.shield(self._destroying)

    async def _destroy(self) -> None:
        await self._addresses.close()
        await self._remove(self)

    async def _as_root(self, command: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            end = await run_in_container(
                replace(self._target, user="0:0"),
                command,
                environ={},
                timeout_s=_RESET_S,
                output=Path(folder) / "output",
            )
        if end.exit_code != 0:
            raise SandboxUnavailable(
                f"{command[0]} in the sandbox: {end.describe()}: {end.last_line}"
            )
