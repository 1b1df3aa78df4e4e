"""Files and folders for their owner's eyes alone: prompts, keys and weights are in them."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path
from typing import BinaryIO, cast

log = logging.getLogger("tracegrad")

# A folder of this name is nobody's but ours; any other may have been shared for a reason.
STATE_FOLDER = ".tracegrad"
FILE_MODE, FOLDER_MODE = 0o600, 0o700
_OTHERS = 0o077


def set_private_umask() -> None:
    """From now on this process, and those that it starts, make files for their owner alone."""
    os.umask(_OTHERS)


def private_folder(path: Path) -> Path:
    """The folder, made if it is not there, its parents too; one that others may enter is closed
    to them, with a line in the log. Raises OSError."""
    if not path.is_dir():
        # `mkdir` gives the mode to the last one alone.
        if path.parent != path and not path.parent.exists():
            private_folder(path.parent)
        try:
            path.mkdir(mode=FOLDER_MODE, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    restrict_permissions(path)
    return path


def private_file(path: Path) -> None:
    """An empty file, if it is not there; others may not read it. Raises OSError."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
    restrict_permissions(path)


def open_private(path: Path, mode: str) -> BinaryIO:
    """As `path.open(mode)`, a binary one; a new file is its owner's alone. Raises OSError."""
    return cast(BinaryIO, open(path, mode, opener=_open_private))


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)


def restrict_permissions(path: Path) -> None:
    """What others may do with it they may no more; one line says so, or that it is not ours."""
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if not mode & _OTHERS:
        return
    closed = mode & ~_OTHERS
    modes = f"{path} is open to other users (mode {mode:04o})"
    if found.st_uid != os.geteuid():
        log.warning("%s, and not ours to close: its owner may, by chmod %04o", modes, closed)
        return
    try:
        path.chmod(closed)
    except OSError as error:  # a file system without modes, or one that is only read
        log.warning("%s, and cannot be closed: %s", modes, error.strerror)
    else:
        log.warning("%s; closed to them now (%04o)", modes, closed)


def is_private(folder: Path) -> bool:
    """Whether the folder is ours, and nobody else may enter it. Raises OSError."""
    found = folder.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return mine and not stat.S_IMODE(found.st_mode) & _OTHERS
