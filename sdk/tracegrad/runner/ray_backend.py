"""Sandboxes on the hosts of a Ray cluster (`pip install "tracegrad[ray]"`).

Attempts, outcomes and the record stay with the runner; each sandbox is an actor that Ray places
where its resources are free (`ray_host.py`). A host that is lost takes its sandboxes with it:
their attempts are `infra_error`, and are made again elsewhere.
"""

from __future__ import annotations

import asyncio
import io
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracegrad.private_files import open_private
from tracegrad.runner.outcomes import ProcessEnd
from tracegrad.runner.output_capture import OutputCapture
from tracegrad.runner.ray_cluster import RayCluster, amounts, placement, with_default_cpu
from tracegrad.runner.ray_host import HostedSandbox, PackedFolder, SandboxHost
from tracegrad.runner.sandbox import BrokenEnvironment, SandboxSpec, SandboxUnavailable
from tracegrad.runner.sandbox_backend import ContainerOptions
from tracegrad.runner.tar_stream import unpack

log = logging.getLogger("tracegrad.runner")

_CLOSE_S = 30.0
_SAY_S = 60
_END_S = 15.0  # SIGTERM, SIGKILL, and what its marker finds


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """
    Attributes:
        address: the cluster's: host:port, or auto. This machine is one of its hosts.
        proxy: its URL: what the hosts reach.
        resources: of each sandbox by Ray's names (CPU, GPU, memory in bytes, a cluster's own); what
            a task says of its `cpus` and `memory_mb` goes before.
        start_s: of a sandbox's start, from when a host has room for it; None: no bound.
        containers: as of `sandbox_backend`, on each host.
    """

    address: str
    proxy: str
    resources: Mapping[str, float] = field(default_factory=dict)
    start_s: float | None = None
    containers: ContainerOptions = field(default_factory=ContainerOptions)


class RaySandboxes:
    """Of one run."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._cluster = RayCluster(settings.address)
        self._actors: set[Any] = set()
        self._packed: dict[Path, Any] = {}  # folders that were sent once, as Ray's references
        self._packing = threading.Lock()

    def connect(self, specs: Iterable[SandboxSpec]) -> int:
        """Before the run; how many of the largest of `specs` have room at once.

        Raises ValueError: no Ray, no cluster, a spec that no host can hold or that needs what only
        this machine has, or a proxy that the hosts do not reach.
        """
        specs = list(specs)
        _check_specs(specs)
        self._cluster.join(self._settings.proxy)
        demands = {tuple(sorted(self._demand(spec).items())) for spec in specs}
        return min(self._cluster.room(dict(demand)) for demand in demands)

    async def start(self, spec: SandboxSpec) -> RaySandbox:
        """Waits until a host has room, however long that takes: hosts may be added. Raises
        SandboxError."""
        with self._cluster.translated(None):
            workspace = await asyncio.to_thread(self._sent, spec.workspace)
            build = await asyncio.to_thread(self._sent, spec.build)
            actor = self._placed(spec)
        self._actors.add(actor)
        try:
            await self._wait_for_host(actor, spec)
            with self._cluster.translated(None):
                async with asyncio.timeout(self._settings.start_s):
                    hosted = await actor.start.remote(
                        spec, self._settings.proxy, self._settings.containers, workspace, build
                    )
        except TimeoutError:
            self._kill(actor)
            raise SandboxUnavailable(f"did not start in {self._settings.start_s:g} s") from None
        except BaseException:
            self._kill(actor)
            raise
        return RaySandbox(self._cluster, actor, hosted, self._settings.proxy, self._kill)

    async def _wait_for_host(self, actor: Any, spec: SandboxSpec) -> None:
        """Raises SandboxUnavailable."""
        placed, waited_s = asyncio.ensure_future(actor.is_there.remote()), 0
        with self._cluster.translated(None):
            while not (await asyncio.wait({placed}, timeout=_SAY_S))[0]:
                waited_s += _SAY_S
                wanted = amounts(self._demand(spec))
                log.warning("a sandbox waits for a host with %s, for %d s now", wanted, waited_s)
            placed.result()

    async def close(self) -> None:
        for actor in [*self._actors]:
            self._kill(actor)
        self._packed.clear()
        await asyncio.to_thread(self._cluster.leave)

    def _placed(self, spec: SandboxSpec) -> Any:
        # No restarts: what ran in it would be gone. An attempt is made again as a whole.
        options = {**placement(self._demand(spec)), "max_restarts": 0}
        return self._cluster.ray.remote(SandboxHost).options(**options).remote()

    def _demand(self, spec: SandboxSpec) -> dict[str, float]:
        demand = dict(self._settings.resources)
        if spec.cpus is not None:
            demand["CPU"] = spec.cpus
        if spec.memory_mb is not None:
            demand["memory"] = float(spec.memory_mb << 20)
        return with_default_cpu(demand)

    def _sent(self, folder: Path | None) -> Any:
        """Raises BrokenEnvironment."""
        if folder is None:
            return None
        with self._packing:
            if folder not in self._packed:
                try:
                    self._packed[folder] = self._cluster.ray.put(PackedFolder.of(folder))
                except OSError as error:
                    raise BrokenEnvironment(f"{folder} cannot be sent: {error}") from None
            return self._packed[folder]

    def _kill(self, actor: Any) -> None:
        """What it runs ends with it."""
        self._actors.discard(actor)
        with suppress(Exception):
            self._cluster.ray.kill(actor)


class RaySandbox:
    """One on some host."""

    shares_files = False

    def __init__(
        self,
        cluster: RayCluster,
        actor: Any,
        hosted: HostedSandbox,
        proxy: str,
        kill: Callable[[Any], None],
    ) -> None:
        self._cluster, self._actor, self._hosted = cluster, actor, hosted
        self._proxy, self._kill = proxy, kill

    @property
    def folder(self) -> str:
        return self._hosted.folder

    @property
    def temp(self) -> str:
        return self._hosted.temp

    def reachable(self, url: str) -> str:
        assert url.startswith(self._proxy), "there is nothing else to reach"
        return self._hosted.proxy + url.removeprefix(self._proxy)

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
        said = self._actor.run.remote(command, dict(environ), timeout_s, marker)
        with open_private(output, "wb") as file:
            capture = OutputCapture(file, echo)
            async with self._ended_on_cancel():
                with self._cluster.translated(self._hosted.host):
                    async for each in said:
                        some = await each
                        if isinstance(some, ProcessEnd):
                            capture.check()
                            return some
                        capture.take(some)
        raise SandboxUnavailable(f"host {self._hosted.host}: the command has no end")

    async def upload(self, source: Path, target: str) -> None:
        packed = await asyncio.to_thread(PackedFolder.of, source)
        with self._cluster.translated(self._hosted.host):
            await self._actor.upload.remote(packed, target)

    async def download(self, source: str, target: Path) -> None:
        with self._cluster.translated(self._hosted.host):
            packed = await self._actor.download.remote(source)
        # An agent made it.
        await asyncio.to_thread(unpack, io.BytesIO(packed.tar), target)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                with suppress(SandboxUnavailable), self._cluster.translated(self._hosted.host):
                    await self._actor.close.remote()
        finally:
            self._kill(self._actor)

    @asynccontextmanager
    async def _ended_on_cancel(self) -> AsyncIterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            with suppress(TimeoutError, SandboxUnavailable):
                async with asyncio.timeout(_END_S):
                    with self._cluster.translated(self._hosted.host):
                        await self._actor.end_run.remote()
            raise


def _check_specs(specs: Iterable[SandboxSpec]) -> None:
    for spec in specs:
        if spec.recipe is not None:
            raise ValueError(
                f"--ray: {spec.recipe} is installed on this machine alone; bake it into an image,"
                " and give its command behind --"
            )
