"""Who a state folder belongs to: one command, and one rank 0, whoever started it."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path
from typing import IO

from tracegrad.private_files import open_private, private_folder

COMMAND, RANKS = "lock", "ranks.lock"
# Ranks whose command was killed end by themselves, a moment later.
PATIENCE_S = 5.0


class FolderLockedError(ValueError):
    """Somebody else has the folder; the message names who, and what to do."""


def lock_for_command(state_dir: Path) -> IO[bytes]:
    """The folder is this command's while the file that this returns is open.

    Raises:
        FolderLockedError: another command, or ranks that somebody started by hand, work in it.
        OSError: it cannot be written.
    """
    file = _claim(state_dir, COMMAND, patience_s=0)
    try:
        lock_for_ranks(state_dir).close()
    except BaseException:
        file.close()
        raise
    return file


def lock_for_workers(state_dir: Path) -> IO[bytes]:
    """As `lock_for_command`, of a command that goes beside ranks of another launcher."""
    return _claim(state_dir, COMMAND, patience_s=0)


def lock_for_ranks(state_dir: Path, holder: str | None = None) -> IO[bytes]:
    """The same for rank 0: it may be started without a command, by torch's launcher. `holder` is
    what others are told who has it; default: the program's name."""
    return _claim(state_dir, RANKS, patience_s=PATIENCE_S, holder=holder)


def _claim(
    state_dir: Path, name: str, *, patience_s: float, holder: str | None = None
) -> IO[bytes]:
    folder = private_folder(private_folder(state_dir) / "run")
    file = open_private(folder / name, "a+b")
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            file.seek(0)
            found = file.read().decode(errors="replace") or "another trainer"
            file.close()
            raise FolderLockedError(
                f"state_dir: {state_dir} is in use by {found}; stop it or take another folder"
                " (--state-dir ...)"
            ) from None
        file.truncate(0)
        file.write(f"{holder or Path(sys.argv[0]).name} (pid {os.getpid()})".encode())
        file.flush()
        return file
