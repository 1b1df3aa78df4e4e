"""Where an attempt's commands run: what a sandbox is made of, and what it can do.

`local_sandbox.py` runs them as processes of this machine, `docker_sandbox.py` in a container. An
attempt knows only what stands here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from tracegrad.runner.outcomes import ProcessEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a sandbox is made of. Those of equal specs are interchangeable: they share a warm pool.

    Attributes:
        image: a Docker image by name; None, and `build` None: processes of this machine.
        build: a folder with a Dockerfile that the image is built from.
        recipe: the agent whose programs are baked into the image, `name@version`; None: none.
        workspace: a folder that is copied in, as `workdir`; None: nothing is.
        workdir: where commands run in a container; None: the image's own.
        cpus: CPU seconds a second; None: no bound.
        memory_mb: MiB of memory; None: no bound.
        pids: processes and threads; None: no bound.
        user: who runs commands in a container, `uid:gid`; None: who the image says.
        read_only: of the root file system; /tmp and `workdir` stay writable.
        mirror: a package mirror's URL that may be reached besides the proxy.
        resettable: a used sandbox of the image may be handed out again.
    """

    image: str | None = None
    build: Path | None = None
    recipe: str | None = None
    workspace: Path | None = None
    workdir: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    pids: int | None = None
    user: str | None = None
    read_only: bool = False
    mirror: str | None = None
    resettable: bool = False


class SandboxError(Exception):
    """A sandbox could not be had. The message is one line: what failed, and the fix."""


class BrokenEnvironment(SandboxError):
    """The environment's own doing (no such image, a build that fails): `env_error`."""


class SandboxUnavailable(SandboxError):
    """The machine's doing (no engine, no memory, a start that hangs): `infra_error`."""


class Sandbox(Protocol):
    """One place to run commands in, for one attempt."""

    @property
    def folder(self) -> str:
        """Where commands run, as they see it."""
        ...

    @property
    def shares_files(self) -> bool:
        """Whether the paths of this machine's files are theirs inside, too."""
        ...

    @property
    def temp(self) -> str:
        """A folder outside of `folder` that files may be uploaded to, as commands see it."""
        ...

    def reachable(self, url: str) -> str:
        """How the proxy's `url` is spelled from inside."""
        ...

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
        """Runs words, or a line for the shell, to the end or to `timeout_s`; nothing of it is left
        then. `environ` comes on top of the environment that the sandbox has by itself; None: not
        to be set. `output`: a file of this machine for what it prints. `marker` stands in the value
        of a variable of `environ` and in no other process's. A cancellation ends it and is raised.

        Raises SandboxUnavailable where the sandbox itself was lost: only the engine's own word is
        believed for that, never what the command printed.
        """
        ...

    async def upload(self, source: Path, target: str) -> None:
        """Copies a file or a folder of this machine to the path `target` inside, whose folders are
        made; one that is not absolute begins in `folder`."""
        ...

    async def download(self, source: str, target: Path) -> None:
        """Copies a file or a folder out; never follows a link that leads elsewhere. Raises
        FileNotFoundError."""
        ...

    async def close(self) -> None:
        """Ends and removes all of it; may be called again."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Sandboxes of `spec` begin with the files that another one had; what ran is not kept. It lasts
    until `remove`, and no longer than the backend; sandboxes that are made of it stay."""

    spec: SandboxSpec
    remove: Callable[[], Awaitable[None]]


@runtime_checkable
class SnapshotSandbox(Sandbox, Protocol):
    """One whose backend keeps its files."""

    async def snapshot(self) -> Snapshot:
        """Of the moment. Raises BrokenEnvironment: some of its files cannot be kept; and
        SandboxUnavailable."""
        ...


class SandboxBackend(Protocol):
    """Makes sandboxes, and knows which are left over."""

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Raises SandboxError. A cancellation leaves nothing behind, and is raised."""
        ...

    async def close(self) -> None:
        """Ends and removes all that it made."""
        ...
