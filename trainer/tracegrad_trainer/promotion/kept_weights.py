"""Weights of versions that were served, on disk: what a rollback loads.

A folder `version-00000007` holds the files of the push, as they were, and a list of them with sizes
and checksums. It is written beside training by a thread, under another name, and renamed when it is
whole. The push's own files may be removed meanwhile: they are open, and stay until they are read.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from tracegrad_trainer.engine.checkpoint.manifest import fsync_folder
from tracegrad_trainer.inference.control_routes import ServedWeights

logger = logging.getLogger(__name__)

LIST = "version.json"
_NAME = re.compile(r"version-(\d{8,})")
_PIECE = 1 << 22


class KeptWeightsError(RuntimeError):
    """Kept weights cannot be used; one line with their path."""


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """`weights_step`: the optimizer step that made the weights; `run_id`: whose."""

    version: int
    step: int | None
    weights_step: int
    run_id: str


class KeptWeights:
    """Of one folder, by the one process that pushes. `done` hears, in the writing thread, of a
    version that was kept (its bytes), or why it was not (a word)."""

    def __init__(self, folder: Path, done: Callable[[KeptVersion, int | str], None]) -> None:
        self.folder = folder
        self._done = done
        self._writing: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._writing is not None and self._writing.is_alive()

    def path(self, version: int) -> Path:
        return self.folder / f"version-{version:08d}"

    def versions(self) -> list[int]:
        """That are there, whole; the oldest first."""
        try:
            found = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for match in found if match)

    def keep(self, kept: KeptVersion, served: ServedWeights) -> bool:
        """Begins to copy the files of a push, which are there now; False: another one is being
        copied still. Raises OSError."""
        if self.busy:
            return False
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in _files_of(served)]
            opened = stack.pop_all()
        self._writing = threading.Thread(
            target=self._write, args=(kept, files, opened), name="kept-weights", daemon=True
        )
        self._writing.start()
        return True

    def wait(self) -> None:
        """Until what is being copied is whole."""
        if self._writing is not None:
            self._writing.join()

    def copy_to(self, version: int, target: Path) -> ServedWeights:
        """Its files in `target`, a new folder, for a push to take; where that has no room, they
        themselves. Raises KeptWeightsError: they are not there, or damaged."""
        source = self.path(version)
        try:
            listed: dict[str, list[int]] = json.loads((source / LIST).read_text())["files"]
            folder = target if _has_room(target, sum(size for size, _ in listed.values())) else None
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            for name, expected in listed.items():
                copy_path = Path(os.devnull) if folder is None else folder / name
                with (source / name).open("rb") as file, copy_path.open("wb") as copy:
                    found = _copy(file, copy)
                if list(found) != expected:
                    raise KeptWeightsError(
                        f"{source / name} is damaged: {found[0]} bytes with CRC-32 {found[1]}, not"
                        f" {expected[0]} with {expected[1]}"
                    )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise KeptWeightsError(f"{source} cannot be read: {error}") from error
        where = folder or source
        paths = tuple(str(where / name) for name in listed if name.endswith(".safetensors"))
        return ServedWeights(version, paths)

    def remove(self, version: int) -> None:
        """It loses its name before its files."""
        gone = self.folder / f".version-{version:08d}.gone"
        shutil.rmtree(gone, ignore_errors=True)
        try:
            os.replace(self.path(version), gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)

    def _write(self, kept: KeptVersion, files: Sequence[IO[bytes]], opened: ExitStack) -> None:
        partial = self.folder / f".version-{kept.version:08d}.partial"
        with opened:
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                listed: dict[str, tuple[int, int]] = {}
                for file in files:
                    name = Path(file.name).name
                    with (partial / name).open("wb") as copy:
                        listed[name] = _copy(file, copy)
                        copy.flush()
                        os.fsync(copy.fileno())
                (partial / LIST).write_text(json.dumps(asdict(kept) | {"files": listed}))
                fsync_folder(partial)
                shutil.rmtree(self.path(kept.version), ignore_errors=True)
                os.replace(partial, self.path(kept.version))
                fsync_folder(self.folder)
                result: int | str = sum(size for size, _ in listed.values())
            except OSError as error:
                logger.warning("the weights of version %d are not kept: %s", kept.version, error)
                shutil.rmtree(partial, ignore_errors=True)
                result = "no_room"
        self._done(kept, result)


def _has_room(target: Path, size: int) -> bool:
    return shutil.disk_usage(target.parent).free > size


def _files_of(served: ServedWeights) -> list[Path]:
    """With the configuration beside an adapter's weights."""
    paths = [Path(path) for path in served.paths]
    return paths + sorted({one for path in paths for one in path.parent.glob("*.json")})


def _copy(source: IO[bytes], target: IO[bytes]) -> tuple[int, int]:
    """Bytes, CRC-32."""
    size = checksum = 0
    while piece := source.read(_PIECE):
        target.write(piece)
        size += len(piece)
        checksum = zlib.crc32(piece, checksum)
    return size, checksum
