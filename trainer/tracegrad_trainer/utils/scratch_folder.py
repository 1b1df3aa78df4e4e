"""Folders that belong to a process, removed by it, or by the next one if it was killed; and folders
that appear whole or not at all.

The owner of a scratch folder holds a lock on it (flock), which the kernel gives back however the
owner ends. Whose folder it is so shows across pid namespaces, where its pid may be nobody's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ScratchFolder:
    """A new folder of ours under `base` (default: the folder for temporary files). `lock`: the
    descriptor that makes it ours; a child process that has it too keeps the folder when we end."""

    def __init__(self, prefix: str, base: Path | None = None) -> None:
        base = base or Path(tempfile.gettempdir())
        remove_left_behind(prefix, base)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=base))
            lock = _lock(self.path)
            if lock is not None:
                break  # else somebody took it for left behind, just now
        self.lock = lock

    def close(self) -> None:
        """Removes it. May be called again."""
        if self.lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)
            self.lock = -1


def remove_left_behind(prefix: str, base: Path) -> None:
    """The folders of owners that are gone; not those of other users."""
    for folder in base.glob(f"{prefix}-*"):
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder; None: another one does, it is gone, or not ours."""
    try:
        found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(found).st_uid == os.geteuid() and os.path.samestat(
            os.fstat(found), os.lstat(folder)
        ):
            return found
    except OSError:
        pass
    os.close(found)
    return None


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside, which becomes `folder` when the block ends well, in place of one that
    was there. Killed between the two renames, the one that was there is `.NAME.old`."""
    partial, old = (folder.with_name(f".{folder.name}.{end}") for end in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
    os.replace(partial, folder)
    shutil.rmtree(old, ignore_errors=True)
