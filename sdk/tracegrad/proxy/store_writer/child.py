"""What the writing process does: `python -m tracegrad.proxy.store_writer.child FD`.

It has no other work than the store's: in one process, a busy event loop and a thread that writes
wait for each other's interpreter. It ends when its proxy hangs up, and what it has read is written;
where the proxy itself has ended, it is killed, as a thread would be.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from tracegrad.host_memory import RETURN_EVERY_S, limit_arenas, return_freed_memory, tune_gc
from tracegrad.log_format import write_json_log, write_log
from tracegrad.proxy.store_writer.frames import (
    Kind,
    Opening,
    WireFrame,
    encode,
    pickled,
    read_frame,
)
from tracegrad.proxy.store_writer.write_turn import WriteTurn
from tracegrad.store import GroupCommitWriter, Store, StoreError, Submission

log = logging.getLogger("tracegrad.proxy")

_READ_BYTES = 1 << 20
# While the writing thread computes, the one that reads what is next waits so long at most.
_SWITCH_S = 0.0005
_PR_SET_PDEATHSIG = 1  # Linux's prctl.h
_UNBOUNDED = sys.maxsize  # its proxy counts what waits, here too


def run(connection: socket.socket) -> None:
    """Until the other end is closed."""
    # Ctrl-C reaches all processes of a terminal; what the proxy still has in hand is to be written.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent()
    sys.setswitchinterval(_SWITCH_S)
    connection.setblocking(True)
    with connection, connection.makefile("rb", buffering=_READ_BYTES) as stream:
        frame = read_frame(stream)
        if frame is None:
            return
        opening: Opening = frame.value()
        if opening.log_format == "json":
            fields = {} if opening.worker is None else {"worker": opening.worker}
            write_json_log("writer", **fields)
        turn = None if opening.writing is None else WriteTurn(opening.writing)
        threading.Thread(target=_return_memory, daemon=True).start()
        with (
            Store.attach(opening.url) as store,
            GroupCommitWriter(
                store,
                max_submissions=_UNBOUNDED,
                max_bytes=_UNBOUNDED,
                turn=turn,
                reconnect_s=opening.reconnect_s,
            ) as writer,
        ):
            store.remember_turns(opening.remembered)
            tune_gc()
            serving = _Serving(connection, writer)
            while (frame := read_frame(stream)) is not None:
                serving.receive(frame)


def _end_with_parent() -> None:
    """Also where this process is stopped, and others wait for their turn to write. The system means
    the thread that started this process: the proxy's main thread, which has the event loop."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # Linux
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _return_memory() -> None:
    while True:
        time.sleep(RETURN_EVERY_S)
        return_freed_memory()


class _Serving:
    """Answers are written by whichever thread knows them: the one that reads, or the writer's."""

    def __init__(self, connection: socket.socket, writer: GroupCommitWriter) -> None:
        self._connection = connection
        self._writer = writer
        self._open: dict[int, Submission] = {}  # by the proxy's numbers
        self._said = 0  # turns without acknowledgement
        self._sending = threading.Lock()

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
                marked = self._writer.doubt(frame.value())
                marked.add_done_callback(partial(self._settled, frame.number))
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
        submission.add_done_callback(partial(self._settled, frame.number))

    def _settled(self, number: int, done: Future[None]) -> None:
        self._open.pop(number, None)
        error = done.exception()
        if error is None:
            self._answer(encode(Kind.DONE, number))
        else:
            self._answer(encode(Kind.FAILED, number, _pickled_error(error)))

    def _answer(self, answer: bytes) -> None:
        """With what is to be said besides."""
        with self._sending, suppress(OSError):  # of a proxy that has hung up
            if (unacknowledged := self._writer.load().unacknowledged) != self._said:
                self._said = unacknowledged
                answer = encode(Kind.UNACKNOWLEDGED, unacknowledged) + answer
            self._connection.sendall(answer)


def _pickled_error(error: BaseException) -> bytes:
    if isinstance(error, StoreError):
        return pickled(type(error)(str(error)))
    log.error("events cannot be written", exc_info=error)
    return pickled(RuntimeError(f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    write_log("writer", text="%(asctime)s %(name)s %(levelname)s %(message)s")
    limit_arenas()
    run(socket.socket(fileno=int(sys.argv[1])))
