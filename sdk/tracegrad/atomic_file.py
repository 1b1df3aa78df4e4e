"""A file that is there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tracegrad.private_files import open_private


class WriteFailed(Exception):
    """One line: which file could not be written, and why."""


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """`path` appears, or is replaced, when the block ends well; otherwise nothing changes.

    It is written beside, under a hidden name, flushed to the disk and then renamed. It is its
    owner's alone, for there are prompts in it. Raises WriteFailed for a full disk and the like.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open_private(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise WriteFailed(f"{path}: {error.strerror or error}; nothing was written") from error
    finally:
        beside.unlink(missing_ok=True)
