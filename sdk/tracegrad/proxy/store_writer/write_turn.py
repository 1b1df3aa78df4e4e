"""Who of several processes writes one file."""

from __future__ import annotations

import fcntl


class WriteTurn:
    """Of writers of one file, one at a time: SQLite would let the others look again and again
    whether it is free. The system frees what a process that is killed holds; one that is stopped
    keeps it until its worker kills it (`store_writer.client`).

    Raises OSError."""

    def __init__(self, file: int) -> None:
        self._file = file

    def __enter__(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)
