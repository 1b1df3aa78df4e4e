"""Whether a checkpoint is whole: its manifest names every file with its size and checksum."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tracegrad.store.checkpoint_manifest import MANIFEST_NAME, manifest_digest

_NAME = re.compile(r"step-(\d{8,})")
_PIECE = 1 << 24
_FILES = TypeAdapter(dict[str, tuple[int, int]])  # name -> bytes, CRC-32


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message is one line with its path."""


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a folder that were finished, oldest first; none where it is not there, or is
    another user's."""
    try:
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(found, key=checkpoint_step)


def may_exist(folder: Path) -> bool:
    """False: it is not there. What another user's folder holds cannot be known, and may be."""
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def checkpoint_step(folder: Path) -> int:
    """The optimizer step that a checkpoint's folder is named after."""
    return int(folder.name.partition("-")[2])


def file_digests(folder: Path, pattern: str) -> dict[str, list[int]]:
    """File name -> [bytes, CRC-32] of the files that match."""
    return {file.name: _digest(file) for file in sorted(folder.glob(pattern))}


def write_manifest(folder: Path, own: dict[str, Any], files: dict[str, list[int]]) -> None:
    """`own` is what belongs to the run as a whole; torch's own table of contents is added."""
    files = files | file_digests(folder, ".metadata")
    with (folder / MANIFEST_NAME).open("w") as file:
        json.dump({**own, "files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    fsync_folder(folder)


def read_manifest(folder: Path, *, digest: str | None = None) -> dict[str, Any]:
    """What the run was saved with, when all files are there with their sizes; `digest` is what
    the manifest's must be.

    Raises:
        CheckpointError: something is not; names the file, and an older checkpoint that is whole.
    """
    if problem := _missing(folder):
        raise CheckpointError(problem + older_checkpoint_hint(folder))
    if digest is not None and manifest_digest(folder) != digest:
        raise CheckpointError(
            f"checkpoint {folder} is not the one that was committed: the digest of its"
            f" {MANIFEST_NAME} is {manifest_digest(folder)}, not {digest}"
        )
    found: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_text())
    return found


def verify_contents(folder: Path, *, share: tuple[int, int] = (0, 1)) -> None:
    """Compare contents with the manifest; with `share` (i, n) every n-th file from the i-th.

    Raises:
        CheckpointError: a file is damaged; names it, and an older checkpoint that is whole.
    """
    first, step = share
    files: dict[str, list[int]] = json.loads((folder / MANIFEST_NAME).read_text())["files"]
    for name in sorted(files)[first::step]:
        try:
            damaged = _digest(folder / name) != files[name]
        except OSError as error:
            raise CheckpointError(f"checkpoint {folder} not read: {error}") from error
        if damaged:
            raise CheckpointError(
                f"checkpoint part {folder / name} is damaged" + older_checkpoint_hint(folder)
            )


def discard_checkpoint(folder: Path) -> None:
    """A checkpoint that nobody may go on from; it loses its name before its files."""
    gone = folder.with_name(f".{folder.name}.refused")
    shutil.rmtree(gone, ignore_errors=True)
    try:
        os.replace(folder, gone)
    except FileNotFoundError:
        return
    fsync_folder(folder.parent)
    shutil.rmtree(gone, ignore_errors=True)


def fsync_folder(folder: Path) -> None:
    """Names in a folder onto the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _missing(folder: Path) -> str | None:
    """What of a checkpoint is not there; None: it is whole, as far as names and sizes show."""
    manifest = folder / MANIFEST_NAME
    try:
        files = _FILES.validate_python(json.loads(manifest.read_text())["files"])
    except FileNotFoundError:
        return f"checkpoint part {manifest} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        line = str(error).partition("\n")[0]
        return f"checkpoint part {manifest} cannot be read: {type(error).__name__}: {line}"
    for name, (size, _) in sorted(files.items()):
        part = folder / name
        if not part.is_file():
            return f"checkpoint part {part} is missing"
        if part.stat().st_size != size:
            return f"checkpoint part {part} has {part.stat().st_size} bytes, not {size}"
    return None


def older_checkpoint_hint(folder: Path) -> str:
    """What can be done about it."""
    whole = [
        one
        for one in list_checkpoints(folder.parent)
        if _NAME.fullmatch(folder.name)
        and checkpoint_step(one) <= _newest_before(folder)
        and not _missing(one)
    ]
    if not whole:
        return "; there is no older whole checkpoint: put the part back from a copy"
    return (
        f"; put it back from a copy, or go on from {whole[-1]}, which is whole:"
        f" checkpoint.resume_from={checkpoint_step(whole[-1])}"
    )


def _newest_before(folder: Path) -> int:
    """The step of the checkpoint that it descends from: one between them was never committed."""
    try:
        parent = json.loads((folder / MANIFEST_NAME).read_text())["parent"]
        found: int = parent["step"]
    except (OSError, ValueError, KeyError, TypeError):  # damaged, of an earlier version, the first
        return checkpoint_step(folder) - 1
    return found


def _digest(file: Path) -> list[int]:
    size = total = 0
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            size += len(piece)
            total = zlib.crc32(piece, total)
    return [size, total]
