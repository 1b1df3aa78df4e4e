"""Starts the process that writes the store, and ends it."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from tracegrad.proxy.store_writer.child import run, run_shared
from tracegrad.proxy.store_writer.frames import Opening

log = logging.getLogger("tracegrad.proxy")

_BUFFER_BYTES = 4 << 20
_FIRST_FILE = 3  # after standard input, output, errors
_LOOK_AGAIN_S = 0.005


class WriterProcess:
    """`connection` is this end of its sockets."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        self._status: int | None = None
        self._waiting = threading.Lock()

    @classmethod
    def fork(cls) -> WriterProcess:
        """For a process that has no event loop yet, and no thread that holds a lock: it costs
        neither the time nor the memory of another interpreter. Raises OSError."""
        return cls._forked(*socket_pair(), run)

    @classmethod
    def fork_shared(cls, opening: Opening) -> WriterProcess:
        """Likewise, to write for all workers; their connections are sent by `connection`, which
        never waits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        return cls._forked(ours, theirs, lambda control: run_shared(control, opening))

    @classmethod
    def _forked(
        cls, ours: socket.socket, theirs: socket.socket, serve: Callable[[socket.socket], None]
    ) -> WriterProcess:
        _flush()
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                _become(theirs, serve)
        return cls(ours, pid)

    @classmethod
    def start(cls) -> WriterProcess:
        """In place of one that ended, another interpreter. Raises OSError."""
        ours, theirs = socket_pair()
        with theirs:
            module = "tracegrad.proxy.store_writer.child"
            process = subprocess.Popen(
                # -P: the folder that the proxy was started in may have modules of its own.
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is its proxy's, also while it starts
            )
        process.returncode = 0  # `wait` is ours: Popen warns of processes that it has not seen end
        return cls(ours, process.pid)

    def kill(self) -> None:
        if self._status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, limit_s: float | None = None) -> int | None:
        """How it ended: its exit status, or minus the signal; None: it has not, in this time."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        with self._waiting:
            while self._status is None:
                try:
                    pid, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
                except ChildProcessError:  # where SIGCHLD is ignored nobody learns how it ended
                    self._status = 0
                    break
                if pid:
                    self._status = os.waitstatus_to_exitcode(status)
                elif deadline is not None and time.monotonic() > deadline:
                    return None
                else:
                    time.sleep(_LOOK_AGAIN_S)
            return self._status

    def ended(self, code: int) -> None:
        """Somebody else has waited for it."""
        self._status = code

    def finish(self, limit_s: float) -> None:
        """On return it has ended, after so many seconds by being killed."""
        if self.wait(limit_s) is None:
            self.kill()
            self.wait()

    def how_it_ended(self) -> str:
        return how_it_ended(self._status or 0)

    def hang_up(self) -> None:
        """It ends when it has written what it has read."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def how_it_ended(code: int) -> str:
    """`code`: an exit status, or minus a signal."""
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # most of the real-time ones have no name
        return f"was ended by signal {-code}"


def socket_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in pair:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    return pair


def _become(connection: socket.socket, serve: Callable[[socket.socket], None]) -> NoReturn:
    """In the fork. Nothing else of the proxy's stays open: who waits for the end of what the proxy
    holds (its port, another worker's sockets) must not wait for this process."""
    code = 1
    try:
        # What the proxy left behind must not be closed later, when its numbers mean other files.
        gc.freeze()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _close_all_but(connection.fileno())
        serve(connection)
        code = 0
    except BaseException:
        log.critical("the store's writer ends", exc_info=True)
    finally:
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # a full disk; none at all
            stream.flush()


def _close_all_but(kept: int) -> None:
    os.closerange(_FIRST_FILE, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
