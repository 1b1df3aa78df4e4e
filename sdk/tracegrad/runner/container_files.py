"""Files of a container: in and out through the engine, which needs no program inside."""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from docker.errors import APIError, NotFound

from tracegrad.runner.docker_engine import (
    DockerEngine,
    broken_or_unavailable,
    explanation,
    is_lost,
)
from tracegrad.runner.sandbox import BrokenEnvironment, SandboxUnavailable
from tracegrad.runner.tar_stream import FileOwner, copy_bounded, pack, pack_folders, unpack

_PASSWD, _GROUP = "/etc/passwd", "/etc/group"


class ContainerFiles:
    """Of one container.

    Args:
        folder: where relative paths begin.
        owner: of what is copied in.
        writable: the only folders that are not read-only; None: all are writable.
    """

    def __init__(
        self,
        engine: DockerEngine,
        container: str,
        *,
        folder: str,
        owner: FileOwner,
        writable: tuple[str, ...] | None,
    ) -> None:
        self._engine, self._container = engine, container
        self._folder, self._owner, self._writable = folder, owner, writable

    async def upload(self, source: Path, target: str) -> None:
        """As of `Sandbox.upload`. A folder's files go beside those that are there.

        Raises BrokenEnvironment: no such file here, or no such place there.
        """
        path = posixpath.normpath(posixpath.join(self._folder, target))
        base = self._base(path)
        missing = [] if self._owner.is_root else await self._missing(base, path)
        name = posixpath.relpath(path, base)
        await self._put(base, lambda file: pack(file, source, name, self._owner, missing))

    async def own(self, path: str) -> None:
        """Makes the folder, if it is not there, and gives it to the owner; not what is in it."""
        base = self._base(path)
        name = posixpath.relpath(path, base)
        assert name != ".", "the engine leaves the folder itself as it is"
        await self._put(base, lambda file: pack_folders(file, [name], self._owner))

    async def make(self, path: str) -> None:
        """The folder, if it is not there."""
        if not await self._engine.call(self._exists, path):
            await self.own(path)

    async def download(self, source: str, target: Path) -> None:
        """As of `Sandbox.download`. Raises OSError: more than a gibibyte."""
        path = posixpath.normpath(posixpath.join(self._folder, source))
        try:
            await self._engine.call(self._get, path, target)
        except APIError as error:
            if isinstance(error, NotFound) and not is_lost(error):
                raise FileNotFoundError(path) from None
            raise SandboxUnavailable(f"{path}: {explanation(error)}") from None

    def _base(self, path: str) -> str:
        """Below which the engine is asked to write."""
        if self._writable is None:
            return "/"
        for base in self._writable:
            if path == base or path.startswith(f"{base}/"):
                return base
        places = " and ".join(self._writable)
        raise BrokenEnvironment(f"{path} is read-only: copy it to {places}")

    async def _missing(self, base: str, path: str) -> list[str]:
        """The folders that lead from `base` to `path` and are not there, as named below it."""
        missing: list[str] = []
        folder = posixpath.dirname(path) if path != base else base
        while folder != base and not await self._engine.call(self._exists, folder):
            missing.insert(0, posixpath.relpath(folder, base))
            folder = posixpath.dirname(folder)
        return missing

    def _exists(self, path: str) -> bool:
        api = self._engine.api
        url = f"{api.base_url}/v{api.api_version}/containers/{self._container}/archive"
        return bool(api.head(url, params={"path": path}).status_code == 200)

    async def _put(self, folder: str, write: Callable[[BinaryIO], None]) -> None:
        def put() -> None:
            with tempfile.TemporaryFile() as file:
                try:
                    write(file)
                except OSError as error:  # no word of the engine's
                    said = f"{error.filename}: {error.strerror}"
                    raise BrokenEnvironment(f"copy into the container: {said}") from None
                self._engine.api.put_archive(self._container, folder, file)

        try:
            await self._engine.call(put)
        except APIError as error:
            if is_lost(error):
                raise SandboxUnavailable(f"copy to {folder}: {explanation(error)}") from None
            raise broken_or_unavailable(error, f"copy to {folder}", "check the path") from None

    def _get(self, path: str, target: Path) -> None:
        chunks, _ = self._engine.api.get_archive(self._container, path)
        try:
            with tempfile.TemporaryFile() as file:
                copy_bounded(chunks, file)
                try:
                    unpack(file, target)
                except FileNotFoundError:
                    raise FileNotFoundError(f"{path} is neither a file nor a folder") from None
        finally:
            chunks.close()


async def file_owner(engine: DockerEngine, container: str, user: str) -> FileOwner:
    """Of `uid[:gid]`, or of names that the container knows. Raises BrokenEnvironment."""
    name, _, group = user.partition(":")
    if name.isdecimal() and (group.isdecimal() or not group):
        return FileOwner(int(name), int(group or 0))
    users = await _table(engine, container, _PASSWD)
    uid = int(name) if name.isdecimal() else _number(users, name, 2)
    gid = int(group) if group.isdecimal() else None
    if gid is None and group:
        gid = _number(await _table(engine, container, _GROUP), group, 2)
    if uid is None or (group and gid is None):
        raise BrokenEnvironment(f"user: the image has no {user!r}; write numbers, uid:gid")
    return FileOwner(uid, (_number(users, name, 3) or 0) if gid is None else gid)


async def _table(engine: DockerEngine, container: str, path: str) -> list[list[str]]:
    files = ContainerFiles(engine, container, folder="/", owner=FileOwner(), writable=None)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "table"
        try:
            await files.download(path, copy)
        except FileNotFoundError:
            return []
        return [line.split(":") for line in copy.read_text(errors="replace").splitlines()]


def _number(table: list[list[str]], name: str, column: int) -> int | None:
    for row in table:
        if row[0] == name and len(row) > column and row[column].isdecimal():
            return int(row[column])
    return None
