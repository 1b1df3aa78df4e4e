"""One process at a time: a lock on a file, which the kernel gives back however its holder ends."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tracegrad.private_files import private_folder

_LOOK_AGAIN_S = 0.1


@asynccontextmanager
async def file_lock(path: Path) -> AsyncIterator[None]:
    """Waits for it. Raises OSError."""
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
