"""Which backend makes a task's sandbox: Docker where its spec names an image, else processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tracegrad.runner.agent_layer import AgentLayer
from tracegrad.runner.local_sandbox import NEEDS_CONTAINER, LocalSandboxes
from tracegrad.runner.sandbox import Sandbox, SandboxBackend, SandboxSpec

# Of all specs together, for each that one spec may have ready.
_TOTAL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOptions:
    """Of a run's containers.

    Attributes:
        warm: sandboxes of a spec that are ready or start ahead; 0: none does.
        network, build_network: as of `DockerSettings`.
        layer: how a recipe is baked into an image.
    """

    warm: int = 2
    network: str | None = None
    build_network: str | None = None
    layer: Callable[[str], AgentLayer] | None = None


def is_contained(spec: SandboxSpec) -> bool:
    return spec.image is not None or spec.build is not None


def image_name(spec: SandboxSpec) -> str | None:
    """By which a broken image is known (`quarantine.py`): what is built is another one when its
    folder changes. None: no container, or nothing that could be built. Reads the folder once."""
    return spec.image if spec.build is None else _built_name(spec.build)


@cache
def _built_name(folder: Path) -> str | None:
    from tracegrad.runner.docker_images import built_name

    try:
        return built_name(folder)
    except OSError:
        return None


def filled(spec: SandboxSpec, asked: SandboxSpec) -> SandboxSpec:
    """`spec` with what it does not say itself from `asked`; image and build are one choice.

    Raises ValueError: there is no image for what only a container has.
    """
    default = SandboxSpec()
    own = {f.name for f in fields(spec) if getattr(spec, f.name) != getattr(default, f.name)}
    if own & {"image", "build"}:
        own |= {"image", "build"}
    found = replace(
        spec, **{f.name: getattr(asked, f.name) for f in fields(spec) if f.name not in own}
    )
    if not is_contained(found):
        for name in NEEDS_CONTAINER:
            if getattr(found, name) != getattr(default, name):
                raise ValueError(f"{name}: needs an image: give image or build")
    return found


def sandbox_backend(
    specs: Iterable[SandboxSpec],
    *,
    proxy: str,
    options: ContainerOptions | None = None,
    shared: Path | None = None,
) -> SandboxBackend:
    """For all of `specs`.

    Args:
        proxy: its URL: what containers reach.
        shared: as of `LocalSandboxes`.

    Raises ValueError (`check_docker`).
    """
    specs = list(specs)
    check_docker(specs)
    local = LocalSandboxes(shared=shared)
    if not any(is_contained(spec) for spec in specs):
        return local
    return _ByKind(local, container_backend(proxy, options or ContainerOptions()))


def check_docker(specs: Iterable[SandboxSpec]) -> None:
    """Raises ValueError: a container is asked for, and the package for that is not installed."""
    if any(is_contained(spec) for spec in specs) and find_spec("docker") is None:
        raise ValueError("image and build need the docker package: pip install 'tracegrad[docker]'")


def check_engine(specs: Iterable[SandboxSpec]) -> None:
    """Raises SandboxUnavailable: a container is asked for, and no engine answers."""
    if any(is_contained(spec) for spec in specs):
        from tracegrad.runner.docker_engine import ping

        ping()


def container_backend(proxy: str, options: ContainerOptions) -> SandboxBackend:
    """Raises ValueError: no URL."""
    from tracegrad.runner.docker_backend import DockerSandboxes, DockerSettings
    from tracegrad.runner.warm_pool import WarmPool

    containers = DockerSandboxes(
        DockerSettings(
            proxy=proxy,
            network=options.network,
            build_network=options.build_network,
            layer=options.layer,
        )
    )
    if options.warm == 0:
        return containers
    return WarmPool(containers, size=options.warm, total=_TOTAL * options.warm)


class _ByKind:
    def __init__(self, local: SandboxBackend, containers: SandboxBackend) -> None:
        self._local, self._containers = local, containers

    async def start(self, spec: SandboxSpec) -> Sandbox:
        backend = self._containers if is_contained(spec) else self._local
        return await backend.start(spec)

    async def close(self) -> None:
        await asyncio.gather(self._local.close(), self._containers.close())
