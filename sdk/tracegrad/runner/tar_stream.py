"""Files into a container and out of it, as tar streams.

What comes out was made by an agent: only regular files and folders are taken, never a link, nothing
beside the target, and no more than fits.
"""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from tracegrad.private_files import STATE_FOLDER

MAX_DOWNLOAD = 1 << 30  # bytes
MAX_MEMBERS = 100_000
_FOLDER_MODE, _FILE_MODE = 0o755, 0o644


@dataclass(frozen=True, slots=True)
class FileOwner:
    uid: int = 0
    gid: int = 0

    @property
    def is_root(self) -> bool:
        return self.uid == 0

    def claim(self, member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid, member.gid = self.uid, self.gid
        member.uname = member.gname = ""
        return member


def pack(
    file: BinaryIO,
    source: Path,
    name: str,
    owner: FileOwner,
    folders: Iterable[str] = (),
) -> None:
    """Writes a tar with `source` as `name`, behind its `folders`. What this machine's programs keep
    in it (traces, runs) is left out. Raises OSError."""
    beside = name in ("", ".")
    state = STATE_FOLDER if beside else f"{name}/{STATE_FOLDER}"

    def claimed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.name == state else owner.claim(member)

    with tarfile.open(fileobj=file, mode="w") as archive:
        for each in folders:
            archive.addfile(owner.claim(_folder(each)))
        if beside:  # what is in it, beside what is there
            for entry in sorted(source.iterdir()):
                archive.add(entry, entry.name, filter=claimed)
        else:
            archive.add(source, name, filter=claimed)
    file.seek(0)


def pack_folders(file: BinaryIO, names: Iterable[str], owner: FileOwner) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive:
        for each in names:
            archive.addfile(owner.claim(_folder(each)))
    file.seek(0)


def _folder(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode = tarfile.DIRTYPE, _FOLDER_MODE
    return member


def copy_bounded(chunks: Iterable[bytes], file: BinaryIO) -> None:
    """Raises OSError (EFBIG)."""
    room = MAX_DOWNLOAD
    for some in chunks:
        room -= len(some)
        if room < 0:
            raise OSError(errno.EFBIG, f"more than {MAX_DOWNLOAD >> 20} MiB")
        file.write(some)
    file.seek(0)


def unpack(file: BinaryIO, target: Path) -> None:
    """The one file or folder in the tar, as `target`.

    Raises FileNotFoundError: it is a link or a device. OSError: too large, or not a tar.
    """
    try:
        with tarfile.open(fileobj=file, mode="r") as archive:
            taken = _unpack(archive, target)
    except tarfile.TarError as error:
        raise OSError(errno.EIO, f"not a tar: {error}") from None
    if not taken:
        raise FileNotFoundError(errno.ENOENT, "neither a file nor a folder", str(target))


def _unpack(archive: tarfile.TarFile, target: Path) -> int:
    taken, room = 0, MAX_DOWNLOAD
    for number, member in enumerate(archive):
        if number >= MAX_MEMBERS:
            raise OSError(errno.EFBIG, f"more than {MAX_MEMBERS} files")
        parts = PurePosixPath(member.name).parts[1:]  # the first one is its own name
        if ".." in parts or not (member.isdir() or member.isreg()):
            continue
        path = target.joinpath(*parts)
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
        else:
            room -= member.size  # a sparse file takes little of the tar
            if room < 0:
                raise OSError(errno.EFBIG, f"more than {MAX_DOWNLOAD >> 20} MiB")
            path.parent.mkdir(parents=True, exist_ok=True)
            _extract(archive, member, path)
        taken += 1
    return taken


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    found = archive.extractfile(member)
    assert found is not None, "a regular file"
    mode = _FILE_MODE | (member.mode & 0o111)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with found, open(os.open(path, flags, mode), "wb") as out:
        shutil.copyfileobj(found, out)
