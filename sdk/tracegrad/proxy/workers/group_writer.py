"""The process that writes one SQLite store for all workers, as their supervisor has it."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from functools import partial

from tracegrad.proxy.store_writer.frames import Opening
from tracegrad.proxy.store_writer.process import WriterProcess, socket_pair
from tracegrad.proxy.workers.restarts import STABLE_S, pause_before_start

log = logging.getLogger("tracegrad.proxy")

# At the end of the proxy, when all workers have ended: whatever they sent is answered by then.
_END_S = 5.0
_LONGEST = 64  # bytes of what a worker says on its line
# Before it is started again: calls of all workers wait, and are refused after half a minute.
LONGEST_PAUSE_S = 5.0


class GroupWriter:
    """Started again where it ends. Workers get their connections to it as
    `store_writer.shared_process` says."""

    def __init__(self, opening: Opening, selector: selectors.BaseSelector) -> None:
        self._opening = opening
        self._selector = selector
        self._process: WriterProcess | None = None
        self._started_at = self._start_at = 0.0
        self._failures = 0
        self._lines: dict[int, socket.socket] = {}  # by worker
        self._asking: set[int] = set()  # workers that want a connection
        self._said_full = False

    @property
    def start_at(self) -> float | None:
        """Where it has no process."""
        return self._start_at if self._process is None else None

    @property
    def is_asked(self) -> bool:
        """Though it has a process: that cannot be connected yet."""
        return self._process is not None and bool(self._asking)

    def line(self, number: int) -> socket.socket:
        """The end of a worker that is about to be started. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._cut(number)
        self._lines[number] = ours
        self._selector.register(ours, selectors.EVENT_READ, partial(self._hear, number))
        return theirs

    def close_lines(self) -> None:
        """In a fork."""
        for line in self._lines.values():
            line.close()
        if self._process is not None:
            self._process.connection.close()

    def advance(self) -> None:
        """Start what is to be started, and connect who asked for it."""
        if self._process is None and self._start_at <= time.monotonic():
            try:
                self._process = WriterProcess.fork_shared(self._opening)
            except OSError as error:
                self._start_later(f"the store's writer has no process ({error})")
                return
            self._started_at = time.monotonic()
        if self._process is not None:
            for number in sorted(self._asking):
                if self._connect(self._process, self._lines[number]):
                    self._asking.discard(number)

    def _connect(self, process: WriterProcess, line: socket.socket) -> bool:
        """False: later."""
        try:
            ours, theirs = socket_pair()
        except OSError as error:
            if not self._said_full:
                self._said_full = True
                log.error("workers wait for the store's writer: %s", error)
            return False
        self._said_full = False
        with ours, theirs:
            try:
                socket.send_fds(process.connection, [b"worker"], [theirs.fileno()])
                socket.send_fds(line, [str(process.pid).encode()], [ours.fileno()])
            except OSError:  # too busy to read, or it has ended and is reaped soon
                return False
        return True

    def _hear(self, number: int) -> None:
        try:
            if self._lines[number].recv(_LONGEST):
                self._asking.add(number)
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._cut(number)

    def _cut(self, number: int) -> None:
        if (line := self._lines.pop(number, None)) is not None:
            self._selector.unregister(line)
            line.close()
        self._asking.discard(number)

    def reaped(self, pid: int, code: int) -> None:
        """Of any process: it may be ours."""
        process = self._process
        if process is None or process.pid != pid:
            return
        process.ended(code)
        process.hang_up()
        self._process = None
        if time.monotonic() - self._started_at >= STABLE_S:
            self._failures = -1
        self._start_later(f"the store's writer (process {pid}) {process.how_it_ended()}")

    def _start_later(self, said: str) -> None:
        self._failures += 1
        pause_s = min(pause_before_start(self._failures), LONGEST_PAUSE_S)
        self._start_at = time.monotonic() + pause_s
        log.error("%s; it is started again%s", said, f" in {pause_s:g} s" if pause_s else "")

    def end(self) -> None:
        """When all workers have ended."""
        for number in list(self._lines):
            self._cut(number)
        if (process := self._process) is not None:
            process.hang_up()
            process.finish(_END_S)
            self._process = None
