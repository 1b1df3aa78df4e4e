"""Sandboxes that are folders of this machine: each attempt's processes run in one of its own.

Nothing is hidden from them: they see this machine's files and network. For agents that are trusted;
`docker_sandbox.py` is for others.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tracegrad.client_environ import set_variables
from tracegrad.private_files import FOLDER_MODE, STATE_FOLDER
from tracegrad.runner.cancellation import to_its_end
from tracegrad.runner.local_process import Rlimits, run_process
from tracegrad.runner.outcomes import ProcessEnd
from tracegrad.runner.sandbox import BrokenEnvironment, SandboxSpec, SandboxUnavailable

_PREFIX = "tracegrad-run-"
_LOCK = ".lock"
_ADMIN_KEY = "TRACEGRAD_API_KEY"  # it opens every rollout
# What only a container can hold.
NEEDS_CONTAINER = ("workdir", "cpus", "pids", "user", "mirror", "read_only")


class LocalSandbox:
    """One folder. `close` removes it, where it was made for the sandbox."""

    shares_files = True

    def __init__(self, folder: Path, *, limits: Rlimits, remove: Path | None) -> None:
        self._folder, self._limits, self._remove = folder, limits, remove

    @property
    def folder(self) -> str:
        return str(self._folder)

    @property
    def temp(self) -> str:
        return tempfile.gettempdir()

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
        if self._remove is not None:
            with suppress(OSError):  # an agent may have removed it, and is scored all the same
                self._folder.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if name != _ADMIN_KEY}
        set_variables(inherited, environ)
        return await run_process(
            command,
            folder=self._folder,
            environ=inherited,
            timeout_s=timeout_s,
            output=output,
            marker=marker,
            echo=echo,
            limits=self._limits,
        )

    async def upload(self, source: Path, target: str) -> None:
        """Raises BrokenEnvironment: `target` leads out of the folder."""
        await asyncio.to_thread(_copy, source, self._inside(target))

    async def download(self, source: str, target: Path) -> None:
        inside = self._inside(source)
        if inside.is_symlink() or not inside.exists():
            raise FileNotFoundError(source)
        await asyncio.to_thread(_copy, inside, target)

    async def close(self) -> None:
        if self._remove is not None:
            await asyncio.to_thread(remove_tree, self._remove)

    def _inside(self, path: str) -> Path:
        found = self._folder / path
        # The parents alone: the last part may be a link of the agent's, which is not followed.
        parent = Path(os.path.realpath(found.parent))
        if not parent.is_relative_to(os.path.realpath(self._folder)):
            raise BrokenEnvironment(
                f"{path!r} lies outside of the attempt's folder: an absolute path needs an image"
            )
        return parent / found.name


class LocalSandboxes:
    """Makes them below the system's folder for temporary files, and removes those that a killed
    runner left there.

    Args:
        shared: where commands of tasks without a workspace run, all of them, and which is left as
            it is; None: each has an empty folder of its own.
    """

    def __init__(self, *, shared: Path | None = None) -> None:
        self._shared = shared
        self._root: Path | None = None
        self._lock: int | None = None
        self._making = threading.Lock()  # folders are made in threads

    async def start(self, spec: SandboxSpec) -> LocalSandbox:
        """Raises SandboxError."""
        for name in ("image", "build", *NEEDS_CONTAINER):
            if (value := getattr(spec, name)) not in (None, False):
                raise BrokenEnvironment(f"{name} = {value}: processes of this machine have none")
        limits = Rlimits(memory_mb=spec.memory_mb)
        if spec.workspace is None and self._shared is not None:
            return LocalSandbox(self._shared, limits=limits, remove=None)
        making = asyncio.create_task(asyncio.to_thread(self._make, spec.workspace, limits))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # A thread that copies is not to be stopped: it would make again what is removed.
            await to_its_end(_removed(making))
            raise
        except (OSError, shutil.Error) as error:
            raise SandboxUnavailable(f"no folder for the attempt: {error}") from None

    async def close(self) -> None:
        """Of all that it made."""
        if self._root is not None:
            await asyncio.to_thread(remove_tree, self._root)
        if self._lock is not None:
            os.close(self._lock)
        self._root = self._lock = None

    def _make(self, workspace: Path | None, limits: Rlimits) -> LocalSandbox:
        made = Path(tempfile.mkdtemp(dir=self._own_root(), prefix=""))
        folder = made / (workspace.resolve().name if workspace is not None else "work")
        if workspace is None:
            folder.mkdir()
        else:
            shutil.copytree(workspace, folder, symlinks=True, ignore=_state_of(workspace))
        return LocalSandbox(folder, limits=limits, remove=made)

    def _own_root(self) -> Path:
        with self._making:
            if self._root is None:
                self._root, self._lock = own_root()
            return self._root


def _state_of(workspace: Path) -> Callable[[str, list[str]], list[str]]:
    """What this machine's programs keep in it, which is no agent's: traces, and runs like this."""
    top = os.fspath(workspace)
    return lambda folder, names: [STATE_FOLDER] if folder == top else []


async def _removed(making: asyncio.Task[LocalSandbox]) -> None:
    with suppress(OSError, shutil.Error):
        await (await making).close()


def own_root() -> tuple[Path, int]:
    """A folder that is removed by a later call, in whichever process, once the file descriptor is
    closed. Removes others' that are."""
    remove_abandoned(Path(tempfile.gettempdir()))
    while True:
        root = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with suppress(BlockingIOError):  # another one takes it for abandoned
            lock = _locked(root)
            if (root / _LOCK).exists():
                return root, lock
            os.close(lock)  # it was faster


def remove_abandoned(temp: Path) -> int:
    """Folders of runners that are gone; how many there were. A living one holds its lock."""
    removed = 0
    for root in temp.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            # Without a lock it is about to get one.
            mine = not root.is_symlink() and root.stat().st_uid == os.geteuid()
            if not (mine and (root / _LOCK).exists()):
                continue
            lock = _locked(root)
            remove_tree(root)
            os.close(lock)
            removed += 1
    return removed


def remove_tree(folder: Path) -> None:
    """Folders that an agent has closed to itself, too, as package caches are."""
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        return
    for each, names, _ in os.walk(folder):
        for path in (os.path.join(each, name) for name in names):
            if not os.path.islink(path):
                with suppress(OSError):
                    os.chmod(path, FOLDER_MODE)
    shutil.rmtree(folder, ignore_errors=True)


def _locked(root: Path) -> int:
    """Raises OSError: another one holds it."""
    lock = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        if target.is_symlink():
            target.unlink()  # a link of the agent's is not written through
        shutil.copy2(source, target, follow_symlinks=False)
