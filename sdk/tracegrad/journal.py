"""The local journal: what was said, on disk before it is sent, until the proxy has acknowledged it.

    <TRACEGRAD_JOURNAL>/<digest of the proxy's URL>/<process>/lock, 000000.jsonl, 000001.jsonl, ...

One line is one record, appended by one `write` before the call that said it returns. It then
survives the end of the process, SIGKILL included; there is no fsync, so that a power failure may
take the last seconds. Only the exporter's thread reads, and what is acknowledged is removed.

Each process has a folder of its own and holds an exclusive `flock` on its `lock` for as long as it
lives. A folder whose lock can be taken was left by a process that ended: whoever takes it sends
what is in it. Records carry ids of their own, so that sending one twice changes nothing.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tracegrad.signal_errors import is_of_signal_handler

_log = logging.getLogger("tracegrad")

SEGMENT_BYTES = 8 << 20  # a file of a journal; acknowledged ones are deleted whole
DEFAULT_JOURNAL_BYTES = 1 << 30  # of all journals for one proxy
# Where the disk takes nothing, as much waits in memory.
MEMORY_BYTES = 8 << 20
_LOCK = "lock"
_NO_LOCK_YET_S = 60.0  # a folder without a lock is being made, or its maker ended

Position = tuple[int, int, int]  # segment, offset, records taken from memory


@dataclass(frozen=True, slots=True)
class JournalBatch:
    """Whole records, without their line ends; `end` is the position behind them."""

    records: list[bytes]
    end: Position


def journal_folder(url: str) -> Path:
    """Where the journals for the proxy at `url` are: under TRACEGRAD_JOURNAL, else under
    `$XDG_STATE_HOME/tracegrad/journal`, else under `~/.local/state/tracegrad/journal`."""
    chosen = os.environ.get("TRACEGRAD_JOURNAL", "").strip()
    if chosen:
        base = Path(chosen)
    elif state := os.environ.get("XDG_STATE_HOME", "").strip():
        base = Path(state) / "tracegrad" / "journal"
    else:
        home = os.path.expanduser("~")
        if home.startswith("~") or not os.access(home, os.W_OK):  # an account without one
            home = os.path.join(tempfile.gettempdir(), f"tracegrad-{os.geteuid()}")
        base = Path(home) / ".local" / "state" / "tracegrad" / "journal"
    # Now: the agent may change its directory.
    return base.absolute() / hashlib.sha256(url.encode()).hexdigest()[:16]


def journal_size_limit() -> int:
    """TRACEGRAD_JOURNAL_BYTES, else `DEFAULT_JOURNAL_BYTES`."""
    chosen = os.environ.get("TRACEGRAD_JOURNAL_BYTES", "").strip()
    if not chosen:
        return DEFAULT_JOURNAL_BYTES
    if not chosen.isascii() or not chosen.isdigit() or len(chosen) > 18:
        raise ValueError(f"TRACEGRAD_JOURNAL_BYTES: {chosen!r} is no number of bytes")
    return int(chosen)


class JournalFull(Exception):
    """There is no room for a record; the message says where."""


class Journal:
    """This process's records for one proxy, oldest first.

    `append` may be called from any thread and from signal handlers, `read` and `acknowledge` from
    one thread. Nothing is made on disk before the first record.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._parent = folder
        self._limit = limit
        self._lock = threading.RLock()  # re-entrant: a signal handler may interrupt `append`
        self._folder: Path | None = None
        self._lock_fd: int | None = None
        self._write_fd: int | None = None
        self._read_fd: int | None = None
        # Segments `_first` to `_last` exist; the last one is written, the first one is read.
        self._first = self._last = 0
        self._offset = 0  # acknowledged bytes of the first
        self._size = 0  # bytes of the last
        self._closed_bytes = 0  # of the others
        self._memory: deque[bytes] = deque()
        self._memory_bytes = self._from_memory = self._into_memory = 0
        self._memory_said = False
        self.others_bytes = 0  # of the journals beside this one; the exporter measures it

    @property
    def folder(self) -> Path | None:
        return self._folder

    def append(self, record: bytes) -> None:
        """Write a record, which holds no line end.

        Raises JournalFull.
        """
        line = record + b"\n"
        with self._lock:
            if self._pending_bytes() + self.others_bytes + len(line) > self._limit:
                raise JournalFull(f"the journals in {self._parent} hold {self._limit} bytes")
            # What waits in memory is older.
            reason = self._write(line) if not self._memory else "the disk took no record before"
            if reason is None:
                return
            if self._memory_bytes + len(line) > MEMORY_BYTES:
                raise JournalFull(f"{reason}, and {MEMORY_BYTES} bytes wait in memory")
            self._memory.append(record)
            self._memory_bytes += len(line)
            self._into_memory += 1
            said, self._memory_said = self._memory_said, True
        if not said:
            _log.warning(
                "tracegrad: %s; events wait in memory and are lost with the process. Set "
                "TRACEGRAD_JOURNAL to a folder of yours on a local disk",
                reason,
            )

    def in_memory(self) -> int:
        """Records that no file has and nobody acknowledged: they end with the process."""
        with self._lock:
            return len(self._memory)

    def end(self) -> Position:
        """The position behind the last record."""
        with self._lock:
            self._measure()
            return self._last, self._size, self._into_memory

    def is_acknowledged(self, target: Position) -> bool:
        """Whether everything before `target` is acknowledged. Takes no lock."""
        return (self._first, self._offset) >= target[:2] and self._from_memory >= target[2]

    def read(self, records: int, size: int) -> JournalBatch | None:
        """The oldest records, at most so many and about so many bytes; None if there are none."""
        while True:
            with self._lock:
                self._measure()
                first, last = self._first, self._last
                length = self._size if first == last else None
                if length is not None and self._offset >= length:
                    return self._read_memory(records, size)
            found = self._read_segment(length, records, size)
            if found:
                taken = sum(len(record) + 1 for record in found)
                return JournalBatch(found, (first, self._offset + taken, self._from_memory))
            if first == last:
                self._forget_lost_file()
                return None
            self._next_segment()

    def acknowledge(self, batch: JournalBatch) -> None:
        """The records of `batch`, the one that was read last, need not be kept."""
        with self._lock:
            for _ in range(batch.end[2] - self._from_memory):
                self._memory_bytes -= len(self._memory.popleft()) + 1
            self._from_memory = batch.end[2]
            if batch.end[0] != self._first:
                return
            self._offset = batch.end[1]
            self._measure()
            if self._first < self._last or self._offset < self._size or not self._size:
                return
            # All of it: the file begins again, as a segment of its own.
            with suppress(OSError):
                if self._write_fd is not None:
                    os.ftruncate(self._write_fd, 0)
                    self._close_reader()
                    self._rename_last()

    def close(self) -> None:
        """Remove the folder if all is acknowledged; a later record makes a new one."""
        with self._lock:
            if self._folder is not None and self.is_acknowledged(self.end()):
                shutil.rmtree(self._folder, ignore_errors=True)
                self.abandon()

    def abandon(self) -> None:
        """Close the files as they are. Also a forked child's way: closing its copies does not
        unlock the folder, which stays its parent's."""
        fds = self._write_fd, self._read_fd, self._lock_fd
        self._write_fd = self._read_fd = self._lock_fd = self._folder = None
        for fd in fds:
            if fd is not None:
                with suppress(OSError):
                    os.close(fd)
        self._offset = self._size = self._closed_bytes = 0
        self._first = self._last = self._last + 1

    def _measure(self) -> None:
        """A signal handler that appends between another append's look at the size and its note of
        it leaves a note that lacks the handler's record."""
        if self._write_fd is not None:
            self._size = os.fstat(self._write_fd).st_size

    def _pending_bytes(self) -> int:
        return self._closed_bytes + self._size - self._offset + self._memory_bytes

    def _write(self, line: bytes) -> str | None:
        """None, or why the disk does not take it."""
        try:
            if self._write_fd is None or self._size >= SEGMENT_BYTES:
                self._open_segment()
            assert self._write_fd is not None
            written = os.write(self._write_fd, line)
            if written < len(line):  # the disk is full; half a record is none
                os.ftruncate(self._write_fd, os.lseek(self._write_fd, 0, os.SEEK_CUR) - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if is_of_signal_handler(error):  # a TimeoutError is one
                raise
            return f"the journal in {self._parent} cannot be written ({error})"
        self._size = os.lseek(self._write_fd, 0, os.SEEK_CUR)  # O_APPEND: the file's end
        return None

    def _open_segment(self) -> None:
        if self._folder is None:
            self._adopt(*_new_folder(self._parent))
        elif (full := self._write_fd) is not None:
            # In an order in which an interrupt after any of them does no harm.
            self._write_fd = None
            self._last += 1
            self._closed_bytes += self._size
            os.close(full)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(self._segment(self._last), flags, 0o600)
        self._size = os.fstat(fd).st_size
        self._write_fd = fd

    def _adopt(self, folder: Path, lock_fd: int) -> None:
        if self._folder is None:
            self._folder, self._lock_fd = folder, lock_fd
        else:  # a signal handler was here meanwhile
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock_fd)

    def _segment(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{number:06d}.jsonl"

    def _rename_last(self) -> None:
        os.rename(self._segment(self._last), self._segment(self._last + 1))
        self._last += 1
        self._offset = self._size = 0
        self._first = self._last  # last: see `reached`

    def _read_memory(self, records: int, size: int) -> JournalBatch | None:
        found: list[bytes] = []
        for record in self._memory:
            if len(found) == records or size <= 0:
                break
            found.append(record)
            size -= len(record)
        if not found:
            return None
        return JournalBatch(found, (self._first, self._offset, self._from_memory + len(found)))

    def _read_segment(self, length: int | None, records: int, size: int) -> list[bytes]:
        if self._read_fd is None:
            with suppress(OSError):
                self._read_fd = os.open(self._segment(self._first), os.O_RDONLY | os.O_CLOEXEC)
        if self._read_fd is None:
            return []
        if length is None:
            length = os.fstat(self._read_fd).st_size
        return _lines(self._read_fd, self._offset, length, records, size)

    def _next_segment(self) -> None:
        with self._lock:
            self._close_reader()
            with suppress(OSError):
                self._closed_bytes -= os.stat(self._segment(self._first)).st_size
                os.unlink(self._segment(self._first))
            self._first += 1
            self._offset = 0

    def _forget_lost_file(self) -> None:
        """Somebody removed the file that is being written: begin another one."""
        with self._lock:
            if self._folder is not None and not self._segment(self._first).exists():
                _log.error(
                    "the tracegrad journal in %s was removed: records are lost", self._folder
                )
                self.abandon()

    def _close_reader(self) -> None:
        # Forgotten first: a child forked in between would close, in `abandon`, whatever file has
        # its number by then, such as the pipe that is to become the child's output.
        fd, self._read_fd = self._read_fd, None
        if fd is not None:
            os.close(fd)


class OrphanedJournal:
    """The journal of a process that ended; this process holds its lock."""

    def __init__(self, folder: Path, lock_fd: int) -> None:
        self.folder = folder
        self._lock_fd: int | None = lock_fd

    def batches(self, records: int, size: int) -> Iterator[list[bytes]]:
        """All of its records, oldest first."""
        for path in sorted(self.folder.glob("*.jsonl")):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                offset, length = 0, os.fstat(fd).st_size
                while found := _lines(fd, offset, length, records, size):
                    offset += sum(len(record) + 1 for record in found)
                    yield found
            finally:
                os.close(fd)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            os.close(fd)


def drop_torn_record(records: Iterable[bytes]) -> list[bytes]:
    """Without the last record of a journal, where its writer was killed in the middle."""
    return [record for record in records if _is_json(record)]


def _is_json(record: bytes) -> bool:
    try:
        json.loads(record)
    except (ValueError, RecursionError):
        return False
    return True


def orphaned_journals(folder: Path) -> Iterator[OrphanedJournal]:
    """Those in `folder` (`journal_folder`) whose process has ended; close or remove each."""
    for entry in _owned_folders(folder):
        fd = _locked(entry)
        if fd is not None:
            yield OrphanedJournal(entry, fd)


def journals_size(folder: Path, but: Path | None) -> int:
    """Bytes of the journals in `folder`, without that of the folder `but`."""
    total = 0
    for entry in _owned_folders(folder):
        if entry != but:
            with suppress(OSError):
                total += sum(file.stat().st_size for file in os.scandir(entry))
    return total


def _owned_folders(folder: Path) -> list[Path]:
    """Nobody else's: what lies in a folder that all may write would be sent with our key."""
    found = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
                if entry.is_dir(follow_symlinks=False) and ours:
                    found.append(Path(entry.path))
    return sorted(found)


def _locked(folder: Path) -> int | None:
    """The lock of a folder that nobody holds, taken."""
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _NO_LOCK_YET_S:
                folder.rmdir()
        return None
    except OSError:
        return None
    if _lock(fd, folder):
        return fd
    os.close(fd)
    return None


def _lock(fd: int, folder: Path) -> bool:
    """Whether `fd` is the lock of the folder as it is now, and was free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(fd).st_ino == os.stat(folder / _LOCK).st_ino
    except OSError as error:  # held; or removed by who held it before
        if is_of_signal_handler(error):
            raise
        return False


def _new_folder(parent: Path) -> tuple[Path, int]:
    """A folder for this process, and its lock. Raises OSError."""
    parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    parent.mkdir(mode=0o700, exist_ok=True)
    for _ in range(10):
        name = f"{time.time_ns() // 1_000_000:013d}-{os.getpid()}-{os.urandom(4).hex()}"
        folder = parent / name
        folder.mkdir(mode=0o700)
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _lock(fd, folder):
            return folder, fd
        os.close(fd)
        shutil.rmtree(folder, ignore_errors=True)  # where there are no locks, one for each record
    raise OSError(errno.ENOLCK, "no lock is to be had there: set TRACEGRAD_JOURNAL to a local disk")


def _lines(fd: int, offset: int, length: int, records: int, size: int) -> list[bytes]:
    """Whole lines from `offset` on: at most so many, and so many bytes unless one is longer."""
    while offset < length:
        data = os.pread(fd, min(size, length - offset), offset)
        *lines, rest = data.split(b"\n")
        if lines:
            return lines[:records]
        if not rest or offset + len(data) >= length:
            return [rest] if rest else []  # without an end: its writer was killed in the middle
        size *= 2
    return []
