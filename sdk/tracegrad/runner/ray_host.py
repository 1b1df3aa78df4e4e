"""What runs on a host of a Ray cluster: an actor with one sandbox of that host.

`ray_backend.py` starts it, and is all that speaks to it. Ray itself is not imported here: it makes
an actor of the class.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import socket
import tarfile
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tracegrad.runner.local_sandbox import own_root
from tracegrad.runner.outcomes import ProcessEnd
from tracegrad.runner.output_capture import CHUNK, MAX_OUTPUT
from tracegrad.runner.sandbox import Sandbox, SandboxBackend, SandboxSpec
from tracegrad.runner.sandbox_backend import ContainerOptions, is_contained, sandbox_backend
from tracegrad.runner.tar_stream import FileOwner, pack

# Ray's own of its workers: an agent that uses Ray itself is not to join this cluster.
_OF_RAY = "RAY_"
_MOST_BEHIND = MAX_OUTPUT // CHUNK  # pieces of output that the runner has not asked for yet


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedSandbox:
    """As of `Sandbox`. `proxy`: how the proxy's URL is spelled inside."""

    host: str
    folder: str
    temp: str
    proxy: str


@dataclass(frozen=True, slots=True)
class PackedFolder:
    """A folder of the runner's machine, as a tar with the one `name` in it."""

    name: str
    tar: bytes

    @classmethod
    def of(cls, source: Path) -> PackedFolder:
        """Also of a file. Raises OSError."""
        source = source.resolve()
        packed = io.BytesIO()
        pack(packed, source, source.name or "root", FileOwner())
        return cls(source.name or "root", packed.getvalue())

    def unpack(self, folder: Path) -> Path:
        """Links too: they are the runner's own."""
        with tarfile.open(fileobj=io.BytesIO(self.tar), mode="r") as archive:
            archive.extractall(folder, filter="fully_trusted")
        return folder / self.name


class SandboxHost:
    """One sandbox. All on the actor's event loop."""

    def __init__(self) -> None:
        self._backend: SandboxBackend | None = None
        self._sandbox: Sandbox | None = None
        # Of an actor that is killed the next one's start removes it.
        self._temp, self._lock = own_root()
        self._running: asyncio.Task[ProcessEnd] | None = None

    async def is_there(self) -> bool:
        """Answers once the actor has been placed."""
        return True

    async def start(
        self,
        spec: SandboxSpec,
        proxy: str,
        options: ContainerOptions,
        workspace: PackedFolder | None,
        build: PackedFolder | None,
    ) -> HostedSandbox:
        """`workspace`, `build`: in the place of the paths in `spec`. Raises SandboxError."""
        spec = replace(
            spec,
            workspace=await self._unpacked(workspace, "workspace"),
            build=await self._unpacked(build, "build"),
        )
        self._backend = sandbox_backend([spec], proxy=proxy, options=replace(options, warm=0))
        self._sandbox = sandbox = await self._backend.start(spec)
        temp = sandbox.temp if is_contained(spec) else str(self._temp)
        return HostedSandbox(
            host=socket.gethostname(),
            folder=sandbox.folder,
            temp=temp,
            proxy=sandbox.reachable(proxy),
        )

    async def _unpacked(self, packed: PackedFolder | None, name: str) -> Path | None:
        if packed is None:
            return None
        return await asyncio.to_thread(packed.unpack, self._temp / name)

    async def run(
        self,
        command: Sequence[str] | str,
        environ: Mapping[str, str | None],
        timeout_s: float | None,
        marker: str,
    ) -> AsyncIterator[bytes | ProcessEnd]:
        """What it prints, as it comes, and its end. As `Sandbox.run`."""
        assert self._sandbox is not None, "it has been started"
        printed: asyncio.Queue[bytes | None] = asyncio.Queue()

        def echo(some: bytes) -> None:
            if printed.qsize() < _MOST_BEHIND:
                printed.put_nowait(some)

        hidden = dict.fromkeys(name for name in os.environ if name.startswith(_OF_RAY))
        self._running = running = asyncio.create_task(
            self._sandbox.run(
                command,
                environ={**hidden, **environ},
                timeout_s=timeout_s,
                output=self._temp / "output",
                marker=marker,
                echo=echo,
            )
        )
        running.add_done_callback(lambda _: printed.put_nowait(None))
        while (some := await printed.get()) is not None:
            yield some
        yield await running

    async def end_run(self) -> None:
        """Of what runs now; it has ended then."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def upload(self, packed: PackedFolder, target: str) -> None:
        """As `Sandbox.upload`."""
        assert self._sandbox is not None, "it has been started"
        with tempfile.TemporaryDirectory(dir=self._temp) as folder:
            source = await asyncio.to_thread(packed.unpack, Path(folder))
            own = Path(target)
            if own.parent == self._temp:  # of this machine's processes, which see it
                shutil.move(source, own)
            else:
                await self._sandbox.upload(source, target)

    async def download(self, source: str) -> PackedFolder:
        """As `Sandbox.download`."""
        assert self._sandbox is not None, "it has been started"
        with tempfile.TemporaryDirectory(dir=self._temp) as folder:
            copy = Path(folder) / "copy"
            await self._sandbox.download(source, copy)
            return await asyncio.to_thread(PackedFolder.of, copy)

    async def close(self) -> None:
        with suppress(Exception):  # the process ends next, and what it holds with it
            await self.end_run()
        try:
            if self._sandbox is not None:
                await self._sandbox.close()
            if self._backend is not None:
                await self._backend.close()
        finally:
            shutil.rmtree(self._temp, ignore_errors=True)
