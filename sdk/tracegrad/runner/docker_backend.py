"""Docker as a place for sandboxes: containers that are bounded, reach the proxy alone, and are
removed whatever happens.

Each is labelled with whose it is before it exists, so that what a killed runner leaves is found by
the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker.errors import APIError, NotFound
from docker.types import LogConfig

from tracegrad.runner.agent_layer import AgentLayer
from tracegrad.runner.container_files import ContainerFiles, file_owner
from tracegrad.runner.container_network import ContainerNetwork, InternalNetwork, NamespaceNetwork
from tracegrad.runner.container_processes import processes_of
from tracegrad.runner.docker_engine import (
    DockerEngine,
    broken_or_unavailable,
    explanation,
    gone,
)
from tracegrad.runner.docker_events import ContainerEvents
from tracegrad.runner.docker_exec import ExecTarget
from tracegrad.runner.docker_images import DockerImages, SandboxImage
from tracegrad.runner.docker_reaper import NAME_PREFIX, reap_leftovers
from tracegrad.runner.docker_sandbox import DockerSandbox
from tracegrad.runner.proxy_relay import RelayTarget
from tracegrad.runner.sandbox import (
    BrokenEnvironment,
    SandboxError,
    SandboxSpec,
    SandboxUnavailable,
)
from tracegrad.runner.sandbox_owner import OWNER_LABEL, RUN_LABEL, SandboxOwner
from tracegrad.runner.tar_stream import FileOwner

START_TIMEOUT_S = 120.0
STAGGER_S = 0.05  # between two starts
STARTS, STOPS = 2 * (os.cpu_count() or 1), 4 * (os.cpu_count() or 1)
WORKSPACE = "/workspace"  # where an image says nothing of a folder
# A container's first process. It waits for nothing but time (seven days: what a killed runner
# leaves ends by itself, should no other one ever start), forks nothing (the bound of processes may
# be hit) and reaps what agents leave: zombies count for that bound. GNU's `env` has the kernel do
# so; busybox's shell does it in `jobs`. The kernel keeps signals from inside away from it but those
# that it has a handler for, as shells do.
_FIRST_PROCESS = """
trap '' HUP INT QUIT PIPE ALRM TERM USR1 USR2
if env --ignore-signal=CHLD true 2>/dev/null; then
    exec env --ignore-signal=CHLD sleep 604800
fi
pipe=/dev/shm/.tracegrad
if mkfifo -m 600 $pipe 2>/dev/null && exec 3<>$pipe && rm $pipe &&
        test -z "$( (read -t 1 none <&3) 2>&1 )"; then
    left=604800
    while test $((left -= 1)) -gt 0; do read -t 1 none <&3; jobs >/dev/null; done
fi
exec sleep 604800
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerSettings:
    """Of all sandboxes of a run.

    Attributes:
        proxy: its URL: the one address that sandboxes reach.
        engine: the engine's URL; None: what DOCKER_HOST says, else the usual one.
        network: `namespace`: no interface but loopback (root or the engine's own user, beside
            the engine); `internal`: a network without a way out, which is weaker; None: the first
            where it is possible.
        build_network: of builds and of baking; None: the engine's own choice.
        pull: images that are not there are asked of their registry.
        layer: how a recipe is baked.
        locks: a folder for locks between runs; None: in the user's cache.
    """

    proxy: str
    engine: str | None = None
    network: str | None = None
    build_network: str | None = None
    pull: bool = True
    layer: Callable[[str], AgentLayer] | None = None
    locks: Path | None = None


class StartLimits:
    """Of one engine: so many starts and stops at a time, and one start a moment. A hundred at one
    moment make it time out. What a pool makes ahead counts, too, which no attempt waits for."""

    def __init__(
        self, *, starts: int = STARTS, stops: int = STOPS, stagger_s: float = STAGGER_S
    ) -> None:
        self._starts, self._stops = asyncio.Semaphore(starts), asyncio.Semaphore(stops)
        self._stagger_s, self._next = stagger_s, 0.0

    @asynccontextmanager
    async def start(self) -> AsyncIterator[None]:
        async with self._starts:
            now = asyncio.get_running_loop().time()
            begin = max(now, self._next)
            self._next = begin + self._stagger_s
            await asyncio.sleep(begin - now)
            yield

    def stop(self) -> AbstractAsyncContextManager[None]:
        return self._stops


@dataclass(slots=True)
class _Opened:
    """What is there once the engine has answered."""

    engine: DockerEngine
    events: ContainerEvents
    images: DockerImages
    network: ContainerNetwork


class DockerSandboxes:
    """Makes them, and removes all of them when it is closed."""

    def __init__(self, settings: DockerSettings, *, limits: StartLimits | None = None) -> None:
        self._settings = settings
        self._proxy = RelayTarget.of_url(settings.proxy, marks_agent=True)
        self._limits = limits or StartLimits()
        self._run = secrets.token_hex(6)
        self._numbers = itertools.count(1)
        owner = {OWNER_LABEL: str(SandboxOwner.this_process())}
        self._labels = {**owner, RUN_LABEL: self._run}
        self._opening: asyncio.Task[_Opened] | None = None
        self._owners: dict[tuple[str, str], FileOwner] = {}
        self._living: set[DockerSandbox] = set()
        self._unwanted: set[str] = set()  # images of snapshots
        self._abandoned: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None

    async def start(self, spec: SandboxSpec) -> DockerSandbox:
        """Raises SandboxError. A cancellation leaves nothing behind once it is closed."""
        if self._closing is not None:
            raise SandboxUnavailable("the runner ends")
        starting = asyncio.create_task(self._start(spec))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A thread that makes a container is not to be stopped: what it makes is removed then.
            starting.cancel()
            task = asyncio.create_task(_abandon(starting))
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)
            raise

    async def close(self) -> None:
        """Also where whoever waits for it is cancelled; may be called again."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        while self._abandoned:
            await asyncio.wait(self._abandoned)
        # What fails here is tried once more below.
        ends = (each.destroy() for each in list(self._living))
        await asyncio.gather(*ends, return_exceptions=True)
        if self._opening is None:
            return
        try:
            opened = await self._opening
        except SandboxError:
            return
        await opened.images.close()
        await self._remove_all(opened)
        await opened.network.close()
        await opened.events.close()
        opened.engine.close()

    async def _opened(self) -> _Opened:
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except SandboxUnavailable:
            if self._opening is opening:
                self._opening = None  # an engine that starts late is found
            raise

    async def _open(self) -> _Opened:
        engine = await DockerEngine.connect(self._settings.engine)
        events = ContainerEvents(engine, f"{RUN_LABEL}={self._run}")
        try:
            await reap_leftovers(engine)
            await events.open()
        except BaseException as error:
            engine.close()
            if isinstance(error, APIError):
                said = f"the engine has no events: {explanation(error)}"
                raise SandboxUnavailable(said) from None
            raise
        images = DockerImages(
            engine,
            layer=self._settings.layer,
            network=self._settings.build_network,
            pull=self._settings.pull,
            locks=self._settings.locks,
            labels=self._labels,
            name=self._name,
        )
        return _Opened(engine, events, images, self._network(engine))

    def _network(self, engine: DockerEngine) -> ContainerNetwork:
        enters = os.geteuid() == 0 or engine.is_own
        kind = self._settings.network or ("namespace" if enters else "internal")
        if kind == "namespace":
            return NamespaceNetwork()
        return InternalNetwork(engine, f"{NAME_PREFIX}{self._run}", self._labels)

    def _name(self) -> str:
        return f"{NAME_PREFIX}{self._run}-{next(self._numbers)}"

    async def _start(self, spec: SandboxSpec) -> DockerSandbox:
        opened = await self._opened()
        image = await opened.images.resolve(spec)  # a build takes its time, and no start's place
        async with self._limits.start():
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    return await self._make(opened, spec, image)
            except TimeoutError:
                raise SandboxUnavailable(
                    f"a container did not start within {START_TIMEOUT_S:.0f} s"
                ) from None

    async def _make(self, opened: _Opened, spec: SandboxSpec, image: SandboxImage) -> DockerSandbox:
        name = self._name()
        workdir = spec.workdir or (WORKSPACE if image.workdir == "/" else image.workdir)
        making = asyncio.create_task(self._run_container(opened, spec, image, name, workdir))
        try:
            container = await asyncio.shield(making)
            sandbox = await self._sandbox(opened, spec, image, container, workdir)
        except BaseException as error:
            await asyncio.shield(_removed_when_made(opened, making, name))
            if isinstance(error, APIError):
                fix = "check image, user, workdir and bounds"
                raise broken_or_unavailable(error, "the container does not start", fix) from None
            raise
        self._living.add(sandbox)
        return sandbox

    async def _run_container(
        self, opened: _Opened, spec: SandboxSpec, image: SandboxImage, name: str, workdir: str
    ) -> Mapping[str, Any]:
        """As the engine tells of it when it runs."""
        engine, api = opened.engine, opened.engine.api
        await engine.call(
            api.create_container,
            image.id,
            ["-c", _FIRST_PROCESS],
            entrypoint=["/bin/sh"],
            name=name,
            user="0:0",
            working_dir=workdir,
            labels=self._labels,
            # What is in the image's own folders is in the volumes, too.
            volumes=["/tmp", workdir] if spec.read_only else None,
            healthcheck={"test": ["NONE"]},
            # A proxy of the user's own (~/.docker/config.json) is not reached from inside.
            use_config_proxy=False,
            host_config=api.create_host_config(
                **bounds(spec), network_mode=await opened.network.mode()
            ),
        )
        await engine.call(api.start, name)
        found: Mapping[str, Any] = await engine.call(api.inspect_container, name)
        return found

    async def _sandbox(
        self,
        opened: _Opened,
        spec: SandboxSpec,
        image: SandboxImage,
        container: Mapping[str, Any],
        workdir: str,
    ) -> DockerSandbox:
        mirrors = [] if spec.mirror is None else [mirror_target(spec.mirror)]
        user = spec.user or image.user or "0:0"
        owner = await self._owner(opened.engine, image, container["Id"], user)
        target = ExecTarget(
            opened.engine,
            container["Id"],
            opened.events.watch(container["Id"]),
            processes_of(opened.engine, container),
            workdir,
            user,
        )
        files = ContainerFiles(
            opened.engine,
            target.container,
            folder=workdir,
            owner=owner,
            writable=("/tmp", workdir) if spec.read_only else None,
        )
        addresses = await opened.network.open(container, [self._proxy, *mirrors])
        sandbox = DockerSandbox(
            target,
            spec=spec,
            image=image,
            files=files,
            owner=owner,
            addresses=addresses,
            remove=self._remove,
            snapshot_labels=self._labels,
            remove_snapshot=self._remove_snapshot,
        )
        try:
            await sandbox.prepare()
        except BaseException:
            await addresses.close()
            raise
        return sandbox

    async def _owner(
        self, engine: DockerEngine, image: SandboxImage, container: str, user: str
    ) -> FileOwner:
        """Raises BrokenEnvironment: the image knows no such user."""
        key = (image.id, user)
        if key not in self._owners:
            self._owners[key] = await file_owner(engine, container, user)
        return self._owners[key]

    async def _remove(self, sandbox: DockerSandbox) -> None:
        opened = await self._opened()
        async with self._limits.stop():
            await remove_container(opened.engine, sandbox.container)
        opened.events.unwatch(sandbox.container)
        self._living.discard(sandbox)
        await self._remove_unwanted(opened)

    async def _remove_snapshot(self, image: str) -> None:
        """Now, or with the last container that is made of it."""
        self._unwanted.add(image)
        await self._remove_unwanted(await self._opened())

    async def _remove_unwanted(self, opened: _Opened) -> None:
        for image in [*self._unwanted]:
            try:
                await opened.engine.call(opened.engine.api.remove_image, image)
            except NotFound:
                pass
            except (APIError, SandboxUnavailable):
                continue  # in use; what is left in the end goes with the backend
            self._unwanted.discard(image)

    async def _remove_all(self, opened: _Opened) -> None:
        """What is left of this run, and its snapshots, the newest first: they lie on each other."""
        engine, api = opened.engine, opened.engine.api
        ours = {"label": [f"{RUN_LABEL}={self._run}"]}
        with suppress(APIError, SandboxUnavailable):
            for found in await engine.call(api.containers, all=True, filters=ours):
                await remove_container(engine, found["Id"])
            images = await engine.call(api.images, filters=ours)
            for found in sorted(images, key=lambda image: -int(image["Created"])):
                with suppress(APIError):
                    await engine.call(api.remove_image, found["Id"], force=True)


def mirror_target(url: str) -> RelayTarget:
    """Raises BrokenEnvironment."""
    try:
        return RelayTarget.of_url(url, marks_agent=False)
    except ValueError as error:
        raise BrokenEnvironment(f"mirror: {error}") from None


def bounds(spec: SandboxSpec) -> dict[str, Any]:
    """Of a container, as the engine takes them."""
    found: dict[str, Any] = {"log_config": LogConfig(type=LogConfig.types.NONE)}
    if spec.cpus is not None:
        found["nano_cpus"] = int(spec.cpus * 1e9)
    if spec.memory_mb is not None:
        # Without swap beside it, which would be as much again.
        found["mem_limit"] = found["memswap_limit"] = spec.memory_mb << 20
    if spec.pids is not None:
        found["pids_limit"] = spec.pids + 1  # the first process is ours
    if spec.user is not None:
        found["security_opt"] = ["no-new-privileges"]
    if spec.read_only:
        found["read_only"] = True
    return found


async def remove_container(engine: DockerEngine, container: str) -> None:
    """With its volumes. Raises SandboxUnavailable."""
    try:
        await engine.call(engine.api.remove_container, container, v=True, force=True)
    except APIError as error:
        if not gone(error):
            said = explanation(error)
            raise SandboxUnavailable(f"a container could not be removed: {said}") from None


async def _removed_when_made(
    opened: _Opened, making: asyncio.Task[Mapping[str, Any]], name: str
) -> None:
    await asyncio.wait([making])
    if not making.cancelled() and making.exception() is None:
        opened.events.unwatch(making.result()["Id"])
    with suppress(SandboxUnavailable):
        await remove_container(opened.engine, name)


async def _abandon(starting: asyncio.Task[DockerSandbox]) -> None:
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None:
        with suppress(SandboxError):
            await starting.result().destroy()
