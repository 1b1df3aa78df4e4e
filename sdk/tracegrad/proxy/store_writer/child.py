"""What the writing process does: `python -m tracegrad.proxy.store_writer.child FD`.

It has no other work than the store's: in one process, a busy event loop and a thread that writes
wait for each other's interpreter. It ends when its proxy hangs up, and what it has read is written;
where the proxy itself has ended, it is killed, as a thread would be.

Workers of one SQLite store have one process together: only one of several could write at a time,
and each would commit a turn or two, where a commit of ten costs little more than that of one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader
from typing import Any, cast

from tracegrad.host_memory import RETURN_EVERY_S, limit_arenas, return_freed_memory, tune_gc
from tracegrad.log_format import write_json_log, write_log
from tracegrad.proxy.store_writer.frames import (
    Kind,
    Opening,
    Readable,
    WireFrame,
    encode,
    pickled,
    read_frame,
)
from tracegrad.store import GroupCommitWriter, Store, StoreError, Submission

log = logging.getLogger("tracegrad.proxy")

_READ_BYTES = 1 << 20
# While the writing thread computes, the one that reads what is next waits so long at most.
_SWITCH_S = 0.0005
_CONTROL_BYTES = 16
# For the answers to who has said all: it waits less, and then writes by itself.
_LAST_ANSWERS_S = 10.0
PROCESS_NAME = "store-writer"  # as ps shows it; Linux knows 15 characters
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # Linux's prctl.h
_UNBOUNDED = sys.maxsize  # its proxy counts what waits, here too


def run(connection: socket.socket) -> None:
    """For one proxy, until it hangs up."""
    _begin()
    _end_with_parent()
    connection.setblocking(True)
    with connection, _stream(connection) as stream:
        frame = read_frame(stream)
        if frame is None or frame.kind != Kind.OPEN:  # it was never needed
            return
        opening: Opening = frame.value()
        with _writing(opening) as writer:
            _Serving(connection, writer, _Unacknowledged(writer)).run(stream)


def run_shared(control: socket.socket, opening: Opening) -> None:
    """For all workers of a proxy. Their connections come by `control`; it ends when that is closed,
    and each of them."""
    _begin()
    # Where it is stopped when the supervisor ends, it must see that all is closed: it may hold the
    # store's lock.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    control.setblocking(True)
    with control, _writing(opening) as writer:
        unacknowledged = _Unacknowledged(writer)
        threads: list[threading.Thread] = []
        while (connection := _next_connection(control)) is not None:
            serving = _Serving(connection, writer, unacknowledged)
            thread = threading.Thread(target=_serve_worker, args=(connection, serving))
            thread.start()
            threads = [each for each in threads if each.is_alive()] + [thread]
        for thread in threads:
            thread.join()


def _next_connection(control: socket.socket) -> socket.socket | None:
    while True:
        try:
            data, files, _, _ = socket.recv_fds(control, _CONTROL_BYTES, 1)
        except ConnectionError:
            return None
        if files:
            return socket.socket(fileno=files[0])
        if not data:
            return None
        log.error("the store's writer has no file left for a worker's connection")


def _serve_worker(connection: socket.socket, serving: _Serving) -> None:
    with connection:
        try:
            connection.setblocking(True)
            with _stream(connection) as stream:
                serving.run(stream)
        except BaseException:
            # Its worker would wait for answers for ever; the next process is given all that it
            # asked. Before the connection is closed: that says that nothing more is written.
            log.critical("the store's writer ends", exc_info=True)
            os._exit(1)


def _begin() -> None:
    # Ctrl-C reaches all processes of a terminal; what the proxy still has in hand is to be written.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_NAME, PROCESS_NAME.encode())
    sys.setswitchinterval(_SWITCH_S)
    threading.Thread(target=_return_memory, daemon=True).start()


def _stream(connection: socket.socket) -> BufferedReader:
    return cast(BufferedReader, connection.makefile("rb", buffering=_READ_BYTES))


@contextmanager
def _writing(opening: Opening) -> Iterator[GroupCommitWriter]:
    """At the end, what was read is written."""
    if opening.log_format == "json":
        fields = {} if opening.worker is None else {"worker": opening.worker}
        write_json_log("writer", **fields)
    with (
        Store.attach(opening.url) as store,
        GroupCommitWriter(
            store,
            max_submissions=_UNBOUNDED,
            max_bytes=_UNBOUNDED,
            reconnect_s=opening.reconnect_s,
        ) as writer,
    ):
        store.remember_turns(opening.remembered)
        tune_gc()
        yield writer


def _end_with_parent() -> None:
    """Also where this process is stopped, and may hold the store's lock. The system means the
    thread that started this process: the proxy's main thread, which has the event loop."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: Any) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # Linux
        prctl(option, value)


def _return_memory() -> None:
    while True:
        time.sleep(RETURN_EVERY_S)
        return_freed_memory()


class _Unacknowledged:
    """Turns that were stored although their callers had given up: which worker's they were is not
    known, and they are said once, with the next answer to any."""

    def __init__(self, writer: GroupCommitWriter) -> None:
        self._writer = writer
        self._said = 0
        self._lock = threading.Lock()

    def unsaid(self) -> int:
        with self._lock:
            found = self._writer.load().unacknowledged
            more, self._said = found - self._said, found
            return more


class _Serving:
    """One connection. Answers are written by whichever thread knows them: the one that reads, or
    the writer's."""

    def __init__(
        self,
        connection: socket.socket,
        writer: GroupCommitWriter,
        unacknowledged: _Unacknowledged,
    ) -> None:
        self._connection = connection
        self._writer = writer
        self._unacknowledged = unacknowledged
        self._open: dict[int, Submission | None] = {}  # by the proxy's numbers; None: turns to mark
        self._settled = threading.Condition()  # of the answers to these
        self._sending = threading.Lock()
        self._unsent: list[bytes] = []
        self._is_behind = False  # the other side does not read: a thread sends what is unsent
        self._is_over = False  # whatever is settled now, is so because nobody waits for it

    def run(self, stream: Readable) -> None:
        """Until the other side has said all, and was answered; or has ended, and nobody who waited
        for it saw a turn's end."""
        bye = False
        while (frame := read_frame(stream)) is not None:
            bye = frame.kind == Kind.BYE
            self.receive(frame)
        if not bye:
            self._is_over = True
            for submission in filter(None, list(self._open.values())):
                submission.withdraw("its worker has ended")
                submission.abandon()
        with self._settled:
            self._settled.wait_for(lambda: not (self._open or self._is_behind), _LAST_ANSWERS_S)

    def receive(self, frame: WireFrame) -> None:
        match frame.kind:
            case Kind.SUBMIT:
                self._submit(frame)
            case Kind.WITHDRAW:
                if (unwanted := self._open.get(frame.number)) is not None:
                    unwanted.withdraw(frame.payload.decode())
            case Kind.ABANDON:
                if (unwanted := self._open.get(frame.number)) is not None:
                    unwanted.abandon()
            case Kind.DOUBT:
                self._open[frame.number] = None
                marked = self._writer.doubt(frame.value())
                marked.add_done_callback(partial(self._settle, frame.number))
            case Kind.PING:
                self._answer(encode(Kind.PONG, frame.number))

    def _submit(self, frame: WireFrame) -> None:
        try:
            submission = self._writer.submit(frame.value(), size=len(frame.payload))
        except Exception as error:
            # A value of a class that only the proxy can import, say: the next process would end
            # by it too.
            self._answer(encode(Kind.FAILED, frame.number, _pickled_error(error)))
            return
        self._open[frame.number] = submission
        submission.add_done_callback(partial(self._settle, frame.number))

    def _settle(self, number: int, done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            self._answer(encode(Kind.DONE, number))
        else:
            self._answer(encode(Kind.FAILED, number, _pickled_error(error)))
        with self._settled:
            del self._open[number]
            self._settled.notify_all()

    def _answer(self, answer: bytes) -> None:
        """With what is to be said besides. Never waits: others have the writing thread too."""
        if self._is_over:
            return
        if more := self._unacknowledged.unsaid():
            answer = encode(Kind.UNACKNOWLEDGED, more) + answer
        with self._sending:
            if not self._is_behind:
                answer = answer[self._send_now(answer) :]
                if not answer:
                    return
                self._is_behind = True
                threading.Thread(target=self._catch_up, daemon=True).start()
            self._unsent.append(answer)

    def _send_now(self, answer: bytes) -> int:
        """How many bytes of it are sent."""
        try:
            return self._connection.send(answer, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # of a proxy that has hung up
            return len(answer)

    def _catch_up(self) -> None:
        while True:
            with self._sending:
                if not self._unsent:
                    self._is_behind = False
                    break
                answers = b"".join(self._unsent)
                self._unsent.clear()
            with suppress(OSError):
                self._connection.sendall(answers)
        with self._settled:
            self._settled.notify_all()


def _pickled_error(error: BaseException) -> bytes:
    if isinstance(error, StoreError):
        return pickled(type(error)(str(error)))
    log.error("events cannot be written", exc_info=error)
    return pickled(RuntimeError(f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    write_log("writer", text="%(asctime)s %(name)s %(levelname)s %(message)s")
    limit_arenas()
    run(socket.socket(fileno=int(sys.argv[1])))
