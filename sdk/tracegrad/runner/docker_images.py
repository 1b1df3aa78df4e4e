"""Images of sandboxes: found by name, built from a folder, with an agent baked in.

What is built or baked is named after all that it is made of (`tracegrad/build:DIGEST`,
`tracegrad/baked:DIGEST`), kept, and made once: a run that finds it being made waits.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker.utils
from docker.errors import APIError, NotFound

from tracegrad.private_files import private_folder
from tracegrad.runner.agent_layer import AgentLayer
from tracegrad.runner.docker_engine import DockerEngine, broken_or_unavailable
from tracegrad.runner.sandbox import BrokenEnvironment, SandboxSpec, SandboxUnavailable
from tracegrad.runner.sandbox_owner import OWNER_LABEL, RUN_LABEL
from tracegrad.runner.tar_stream import FileOwner, pack

log = logging.getLogger("tracegrad.runner")

BUILT, BAKED = "tracegrad/build", "tracegrad/baked"
RECIPE_LABEL = "tracegrad.recipe"
BAKE_TIMEOUT_S = 1800.0
_MADE_AT_ONCE = 2  # each holds a thread of the engine's
_LAST_LINES = 3
_LOOK_AGAIN_S = 0.1  # whether a lock is free


@dataclass(frozen=True, slots=True)
class SandboxImage:
    """`user`: as the image says, "" is root. `workdir` "/" where it says none."""

    id: str
    user: str
    workdir: str

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> SandboxImage:
        config = found.get("Config") or {}
        return cls(found["Id"], config.get("User") or "", config.get("WorkingDir") or "/")


class DockerImages:
    """Images of one run: each is looked for once.

    Args:
        layer: the layer of a recipe (`SandboxSpec.recipe`).
        network: for lines of builds and bakes, as of `docker run --network`; None: the engine's
            own choice.
        pull: images that are not there are asked of their registry.
        locks: a folder for locks, of this user's.
        labels: of the containers in which is baked: whoever they are left over from.
    """

    def __init__(
        self,
        engine: DockerEngine,
        *,
        layer: Callable[[str], AgentLayer] | None = None,
        network: str | None = None,
        pull: bool = True,
        locks: Path | None = None,
        labels: Mapping[str, str],
        name: Callable[[], str],
    ) -> None:
        self._engine, self._layer, self._network, self._pull = engine, layer, network, pull
        self._locks = locks or _cache() / "docker"
        self._labels, self._name = labels, name
        self._making = asyncio.Semaphore(_MADE_AT_ONCE)
        self._found: dict[tuple[object, ...], asyncio.Task[SandboxImage]] = {}

    async def resolve(self, spec: SandboxSpec) -> SandboxImage:
        """Raises BrokenEnvironment, SandboxUnavailable. The first is remembered: what does not
        build is not built again for each attempt."""
        key = (spec.image, spec.build, spec.recipe)
        if key not in self._found:
            self._found[key] = asyncio.create_task(self._resolve(spec))
        task = self._found[key]
        try:
            return await asyncio.shield(task)  # others wait for it, too
        except SandboxUnavailable:
            self._found.pop(key, None)
            raise

    async def close(self) -> None:
        for task in self._found.values():
            task.cancel()
        await asyncio.gather(*self._found.values(), return_exceptions=True)

    async def _resolve(self, spec: SandboxSpec) -> SandboxImage:
        if spec.build is not None:
            image = await self._built(spec.build)
        elif spec.image is not None:
            image = await self._named(spec.image)
        else:
            raise BrokenEnvironment("a container needs an image: give image or build")
        return image if spec.recipe is None else await self._baked(image, spec.recipe)

    async def _named(self, name: str) -> SandboxImage:
        if (found := await self._inspect(name)) is not None:
            return found
        if self._pull:
            log.info("pulling %s", name)
            await self._ask_registry(name)
            if (found := await self._inspect(name)) is not None:
                return found
        raise BrokenEnvironment(
            f"image: there is no {name!r}; pull it, or build it (docker images shows what is there)"
        )

    async def _inspect(self, name: str) -> SandboxImage | None:
        try:
            return SandboxImage.of(await self._engine.call(self._engine.api.inspect_image, name))
        except NotFound:
            return None
        except APIError as error:
            raise broken_or_unavailable(error, f"image {name!r}", "check its name") from None

    async def _ask_registry(self, name: str) -> None:
        repository, tag = docker.utils.parse_repository_tag(name)
        try:
            await self._engine.call_long(
                _drained, self._engine.api.pull, repository, tag=tag or "latest"
            )
        except APIError as error:
            raise broken_or_unavailable(
                error, f"image {name!r} cannot be pulled", "check its name, or `docker login`"
            ) from None

    async def _built(self, folder: Path) -> SandboxImage:
        try:
            name = await asyncio.to_thread(built_name, folder)
        except OSError as error:
            raise BrokenEnvironment(f"build: {folder}: {error.strerror or error}") from None
        return await self._once(name, lambda: self._build(folder, name))

    async def _build(self, folder: Path, name: str) -> None:
        log.info("building %s from %s", name, folder)
        try:
            said = await self._engine.call_long(self._build_log, folder, name)
        except APIError as error:
            fix = "correct its Dockerfile"
            raise broken_or_unavailable(error, f"build of {folder}", fix) from None
        except (OSError, TypeError) as error:  # docker's own check of the folder
            raise BrokenEnvironment(f"build: {folder}: {error}") from None
        if said:
            raise BrokenEnvironment(f"build of {folder} failed: {said}; correct its Dockerfile")

    def _build_log(self, folder: Path, name: str) -> str | None:
        """The last lines of one that failed."""
        lines: list[str] = []
        for part in self._engine.api.build(
            path=str(folder),
            tag=name,
            rm=True,
            forcerm=True,
            decode=True,
            network_mode=self._network,
        ):
            if "error" in part:
                return " | ".join([*lines[-_LAST_LINES:], str(part["error"]).strip()])
            lines += [line for line in str(part.get("stream", "")).splitlines() if line.strip()]
        return None

    async def _baked(self, base: SandboxImage, recipe: str) -> SandboxImage:
        if self._layer is None:
            raise BrokenEnvironment(f"recipe: nobody here knows how to bake {recipe!r}")
        layer = self._layer(recipe)
        try:
            name = f"{BAKED}:{await asyncio.to_thread(digest_of_layer, layer, base.id)}"
        except OSError as error:
            raise BrokenEnvironment(f"recipe {recipe}: {error}") from None
        return await self._once(name, lambda: self._bake(base, layer, name))

    async def _once(self, name: str, make: Callable[[], Awaitable[None]]) -> SandboxImage:
        """Of all processes of this user the first one makes it."""
        if (found := await self._inspect(name)) is not None:
            return found
        try:
            lock = self._locks / f"{name.replace('/', '-').replace(':', '-')}.lock"
            async with self._making, file_lock(lock):
                if await self._inspect(name) is None:
                    await make()
        except OSError as error:
            raise SandboxUnavailable(f"no lock for {name}: {error}") from None
        found = await self._inspect(name)
        if found is None:
            raise SandboxUnavailable(f"{name} was made, and removed by somebody")
        return found

    async def _bake(self, base: SandboxImage, layer: AgentLayer, name: str) -> None:
        log.info("baking %s into an image, once: %s", layer.id, name)
        engine, api = self._engine, self._engine.api
        container = self._name()
        try:
            await engine.call(
                api.create_container,
                base.id,
                ["-ec", "\n".join(layer.lines)],
                entrypoint=["/bin/sh"],
                name=container,
                user="0:0",
                labels=dict(self._labels),
                host_config=api.create_host_config(network_mode=self._network or "default"),
            )
            for inside, path in layer.files.items():
                await engine.call(_upload, api, container, path, inside)
            await engine.call(api.start, container)
            ended = await engine.call(api.wait, container, timeout=int(BAKE_TIMEOUT_S))
            if ended["StatusCode"] != 0:
                said = await engine.call(api.logs, container, tail=_LAST_LINES)
                lines = " | ".join(said.decode(errors="replace").split("\n")).strip(" |")
                raise BrokenEnvironment(
                    f"recipe {layer.id} could not be baked into the image: exit code"
                    f" {ended['StatusCode']}: {lines[-500:]}"
                )
            await commit(engine, container, base, {RECIPE_LABEL: layer.id}, name)
        except APIError as error:
            fix = "the image needs /bin/sh"
            raise broken_or_unavailable(error, f"recipe {layer.id}", fix) from None
        finally:
            with suppress(APIError, SandboxUnavailable):
                await asyncio.shield(
                    engine.call(api.remove_container, container, v=True, force=True)
                )


async def commit(
    engine: DockerEngine,
    container: str,
    base: SandboxImage,
    labels: Mapping[str, str],
    name: str | None = None,
) -> str:
    """The container's files as an image, which says of user, folder and command what `base` says.
    Its id."""
    # A container's own labels would stay in it, and mark containers made of it as ours.
    repository, _, tag = (name or ":").partition(":")
    marks = {OWNER_LABEL: "", RUN_LABEL: "", **labels}
    changes = [
        f"USER {base.user or '0'}",
        f"WORKDIR {base.workdir}",
        "ENTRYPOINT []",
        'CMD ["/bin/sh"]',
        *(f"LABEL {name}={json.dumps(value)}" for name, value in marks.items()),
    ]
    made = await engine.call(
        engine.api.commit, container, repository or None, tag or None, changes=changes
    )
    return str(made["Id"])


def digest_of_layer(layer: AgentLayer, base: str) -> str:
    """`base`: the id of the image that it is baked into. Raises OSError."""
    found = hashlib.sha256(json.dumps([base, layer.id, layer.lines]).encode())
    for inside, path in sorted(layer.files.items()):
        found.update(f"\0{inside}\0".encode())
        digest_of_files(found, path)
    return found.hexdigest()[:32]


def digest_of_files(found: Any, path: Path) -> None:
    """Of names, kinds, modes and contents, not of times. Raises OSError."""
    if path.is_symlink():
        found.update(b"l" + os.readlink(path).encode())
    elif path.is_dir():
        for entry in sorted(path.iterdir()):
            found.update(f"d{entry.name}\0".encode())
            digest_of_files(found, entry)
    else:
        found.update(b"x" if os.access(path, os.X_OK) else b"f")
        with path.open("rb") as file:
            while some := file.read(1 << 20):
                found.update(some)


def built_name(folder: Path) -> str:
    """Of the image that is built from it, as it is now. Raises OSError."""
    return f"{BUILT}:{_digest_of_context(folder)}"


def _digest_of_context(folder: Path) -> str:
    """Of what a build sees: .dockerignore leaves files out. Raises OSError."""
    if not (folder / "Dockerfile").is_file():
        raise FileNotFoundError(0, "it has no Dockerfile")
    ignore = folder / ".dockerignore"
    lines = ignore.read_text().splitlines() if ignore.is_file() else []
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    found = hashlib.sha256()
    for name in sorted(docker.utils.exclude_paths(str(folder), patterns)):
        path = folder / name
        found.update(f"\0{name}\0".encode())
        if not path.is_dir() or path.is_symlink():
            digest_of_files(found, path)
    return found.hexdigest()[:32]


def _drained(pull: Callable[..., Any], repository: str, *, tag: str) -> None:
    """Raises APIError, and BrokenEnvironment for what the registry said after its answer began."""
    for part in pull(repository, tag=tag, stream=True, decode=True):
        if "error" in part:
            raise BrokenEnvironment(f"image {repository}:{tag}: {part['error']}")


def _upload(api: docker.APIClient, container: str, source: Path, inside: str) -> None:
    with tempfile.TemporaryFile() as file:
        pack(file, source, inside.lstrip("/"), FileOwner())
        api.put_archive(container, "/", file)


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "tracegrad"


@asynccontextmanager
async def file_lock(path: Path) -> AsyncIterator[None]:
    """One process at a time; the kernel gives it back however its holder ends. Waits for it. Raises
    OSError."""
    private_folder(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _taken(fd):  # noqa: ASYNC110 (another process has it)
            await asyncio.sleep(_LOOK_AGAIN_S)
        yield
    finally:
        os.close(fd)


def _taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
