"""Where the files of weight pushes have room.

Two versions are kept: the one that is served, to return to, and the one under way. Nothing here
loads torch: `trainer serve` asks before anything starts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from tracegrad_trainer.utils.scratch_folder import remove_left_behind

VERSIONS = 2
PREFIX = "tracegrad-weights"  # of the folder with the files
_SHARED = Path("/dev/shm")


def choose_directory(asked: Path | None, size: int) -> Path:
    """Where two versions of `size` bytes each have room: `asked`, else shared memory, else the
    folder for temporary files (containers often have 64 MB of shared memory).

    Raises:
        ValueError: nowhere; names the field, and what is free.
    """
    tried = [asked] if asked is not None else [_SHARED, Path(tempfile.gettempdir())]
    found = []
    for directory in tried:
        if not (directory.is_dir() and os.access(directory, os.W_OK)):
            found.append(f"{directory} cannot be written")
            continue
        remove_left_behind(PREFIX, directory)  # a killed run's files are as large as ours
        free = shutil.disk_usage(directory).free
        if free >= VERSIONS * size:
            return directory
        found.append(f"{directory} has {free >> 20} MiB free")
    raise ValueError(
        f"push.folder: two versions of the weights take {VERSIONS * size >> 20} MiB, and"
        f" {', '.join(found)}; make room, or set it to a folder that has it and that vLLM sees"
    )
