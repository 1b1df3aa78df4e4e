"""Sandboxes on the hosts of a Ray cluster (`pip install "tracegrad[ray]"`).

Attempts, outcomes and the record stay with the runner; each sandbox is an actor that Ray places
where its resources are free (`ray_host.py`). A host that is lost takes its sandboxes with it:
their attempts are `infra_error`, and are made again elsewhere.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tracegrad.private_files import open_private
from tracegrad.runner.outcomes import ProcessEnd
from tracegrad.runner.output_capture import OutputCapture
from tracegrad.runner.ray_host import HostedSandbox, PackedFolder, SandboxHost
from tracegrad.runner.sandbox import BrokenEnvironment, SandboxSpec, SandboxUnavailable
from tracegrad.runner.sandbox_backend import ContainerOptions
from tracegrad.runner.tar_stream import unpack

log = logging.getLogger("tracegrad.runner")

_CONNECT_S, _CLOSE_S = 10.0, 30.0
_SAY_S = 60
_END_S = 15.0  # SIGTERM, SIGKILL, and what its marker finds
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
        self._ray: Any = None
        self._joined = False  # the cluster, here
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
        self._ray, self._joined = _connected(self._settings.address)
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        _check_proxy(self._settings.proxy, [node["NodeManagerAddress"] for node in nodes])
        rooms = []
        for demand in {tuple(sorted(self._demand(spec).items())) for spec in specs}:
            rooms.append(sum(_room(node["Resources"], dict(demand)) for node in nodes))
            if rooms[-1] == 0:
                wanted = _amounts(dict(demand))
                raise ValueError(f"--ray-resource: no host of the cluster has {wanted}")
        return min(rooms)

    async def start(self, spec: SandboxSpec) -> RaySandbox:
        """Waits until a host has room, however long that takes: hosts may be added. Raises
        SandboxError."""
        assert self._ray is not None, "connect comes first"
        with _translated(self._ray, None):
            workspace = await asyncio.to_thread(self._sent, spec.workspace)
            build = await asyncio.to_thread(self._sent, spec.build)
            actor = self._placed(spec)
        self._actors.add(actor)
        try:
            await self._wait_for_host(actor, spec)
            with _translated(self._ray, None):
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
        return RaySandbox(self._ray, actor, hosted, self._settings.proxy, self._kill)

    async def _wait_for_host(self, actor: Any, spec: SandboxSpec) -> None:
        """Raises SandboxUnavailable."""
        placed, waited_s = asyncio.ensure_future(actor.is_there.remote()), 0
        with _translated(self._ray, None):
            while not (await asyncio.wait({placed}, timeout=_SAY_S))[0]:
                waited_s += _SAY_S
                wanted = _amounts(self._demand(spec))
                log.warning("a sandbox waits for a host with %s, for %d s now", wanted, waited_s)
            placed.result()

    async def close(self) -> None:
        for actor in [*self._actors]:
            self._kill(actor)
        self._packed.clear()
        if self._joined:
            await asyncio.to_thread(self._ray.shutdown)

    def _placed(self, spec: SandboxSpec) -> Any:
        demand = self._demand(spec)
        options: dict[str, Any] = {
            "num_cpus": demand.pop("CPU"),
            "num_gpus": demand.pop("GPU", 0),
            "memory": demand.pop("memory", None),
            "resources": demand,
            "max_restarts": 0,  # what ran in it would be gone: an attempt is made again as a whole
        }
        return self._ray.remote(SandboxHost).options(**options).remote()

    def _demand(self, spec: SandboxSpec) -> dict[str, float]:
        demand = {"CPU": 1.0, **self._settings.resources}
        if spec.cpus is not None:
            demand["CPU"] = spec.cpus
        if spec.memory_mb is not None:
            demand["memory"] = float(spec.memory_mb << 20)
        return {name: amount for name, amount in demand.items() if amount or name == "CPU"}

    def _sent(self, folder: Path | None) -> Any:
        """Raises BrokenEnvironment."""
        if folder is None:
            return None
        with self._packing:
            if folder not in self._packed:
                try:
                    self._packed[folder] = self._ray.put(PackedFolder.of(folder))
                except OSError as error:
                    raise BrokenEnvironment(f"{folder} cannot be sent: {error}") from None
            return self._packed[folder]

    def _kill(self, actor: Any) -> None:
        """What it runs ends with it."""
        self._actors.discard(actor)
        with suppress(Exception):
            self._ray.kill(actor)


class RaySandbox:
    """One on some host."""

    shares_files = False

    def __init__(
        self, ray: Any, actor: Any, hosted: HostedSandbox, proxy: str, kill: Callable[[Any], None]
    ) -> None:
        self._ray, self._actor, self._hosted = ray, actor, hosted
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
                with _translated(self._ray, self._hosted):
                    async for each in said:
                        some = await each
                        if isinstance(some, ProcessEnd):
                            capture.check()
                            return some
                        capture.take(some)
        raise SandboxUnavailable(f"host {self._hosted.host}: the command has no end")

    async def upload(self, source: Path, target: str) -> None:
        packed = await asyncio.to_thread(PackedFolder.of, source)
        with _translated(self._ray, self._hosted):
            await self._actor.upload.remote(packed, target)

    async def download(self, source: str, target: Path) -> None:
        with _translated(self._ray, self._hosted):
            packed = await self._actor.download.remote(source)
        # An agent made it.
        await asyncio.to_thread(unpack, io.BytesIO(packed.tar), target)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                with suppress(SandboxUnavailable), _translated(self._ray, self._hosted):
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
                    with _translated(self._ray, self._hosted):
                        await self._actor.end_run.remote()
            raise


@contextmanager
def _translated(ray: Any, hosted: HostedSandbox | None) -> Iterator[None]:
    """What the other side raised, as it raised it; what Ray says of hosts and actors, as
    SandboxUnavailable."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if not isinstance(cause, Exception):
            raise SandboxUnavailable(f"ray: {_in_one_line(error)}") from None
        raise cause from None
    except ray.exceptions.RayError as error:
        where = "ray" if hosted is None else f"host {hosted.host} is lost"
        raise SandboxUnavailable(f"{where}: {_in_one_line(error)}") from None


def _amounts(demand: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in demand.items())


def _in_one_line(error: Exception) -> str:
    """The first one says what, the last one why: between them is a traceback of the other side."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " … ".join(dict.fromkeys(each[:300] for each in (*lines[:1], *lines[-1:])))
    return f"{type(error).__name__}: {said or 'no more is known'}"


def check_ray() -> None:
    """Raises ValueError."""
    if find_spec("ray") is None:
        raise ValueError("--ray needs the ray package: pip install 'tracegrad[ray]'")


def _connected(address: str) -> tuple[Any, bool]:
    """The package, and whether this process has joined the cluster just now. Raises ValueError:
    nobody is there."""
    check_ray()
    if address.startswith("ray://"):
        raise ValueError(
            f"--ray {address}: run on a host of the cluster, and give auto or host:port"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        return ray, False
    _check_listening(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ValueError(f"--ray {address}: {_in_one_line(error)}") from None
    return ray, True


def _check_listening(address: str) -> None:
    """Ray itself tries for minutes. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(f"--ray {address}: nobody is there: {error}") from None


def _check_specs(specs: Iterable[SandboxSpec]) -> None:
    for spec in specs:
        if spec.recipe is not None:
            raise ValueError(
                f"--ray: {spec.recipe} is installed on this machine alone; bake it into an image,"
                " and give its command behind --"
            )


def _check_proxy(proxy: str, addresses: Sequence[str]) -> None:
    """Raises ValueError."""
    host = urlsplit(proxy).hostname or ""
    here = {*_LOOPBACK, *_own_addresses()}
    elsewhere = [each for each in addresses if each not in here]
    if host in _LOOPBACK and elsewhere:
        raise ValueError(
            f"TRACEGRAD_URL: {proxy} is this machine alone, and {elsewhere[0]} is not; serve the"
            " proxy on an address that the hosts reach (--host, with an admin key), and name that"
        )


def _own_addresses() -> set[str]:
    import ray

    found = {ray.util.get_node_ip_address()}
    with suppress(OSError):
        found |= {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    return found


def _room(has: Mapping[str, float], demand: Mapping[str, float]) -> int:
    rooms = [int(has.get(name, 0.0) / amount) for name, amount in demand.items() if amount]
    return min(rooms, default=1)
