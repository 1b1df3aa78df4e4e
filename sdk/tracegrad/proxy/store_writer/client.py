"""The store's writer as an event loop has it: events go to a process of their own and are answered.

What that process has not answered is kept, and given to the next one where it ends: events that are
stored already change nothing (`store.Store.append`). What a caller has given up is not written
again; the turns of it that may be stored are marked instead.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from itertools import count
from typing import Protocol, Self

from tracegrad.events import Event, Turn
from tracegrad.proxy.store_writer.frames import (
    FrameReader,
    Kind,
    Opening,
    WireFrame,
    encode,
    head,
    pickled,
)
from tracegrad.store import (
    EventRejected,
    GroupCommitWriter,
    Store,
    StoreBusy,
    StoreUnavailable,
    Submission,
    WriterLoad,
)
from tracegrad.store.write.group_commit import MAX_BYTES, MAX_SUBMISSIONS

log = logging.getLogger("tracegrad.proxy")

# A process that does not answer so many looks in a row is killed, after half a minute: looks and
# not time, since a proxy that was stopped itself blames nobody. A store that hangs is no reason:
# answers to looks do not wait for it.
LOOK_EVERY_S = 5.0
MISSED_LOOKS = 6
# Before the process is reached again where this one has no file left for it.
_REACH_AGAIN_S = 0.2
# A submission that so many processes ended by, one after the other, is refused.
_MOST_TRIES = 5
# For the last commits of a process that is not needed any more; then the proxy itself writes what
# is left. Less than the supervisor gives its workers.
_END_S = 5.0
_READ_BYTES = 1 << 16


class WriterLink(Protocol):
    """How a proxy, or a worker of one, reaches the process that writes for it.

    `wants_opening`: a process does not know its `Opening` yet. `missed_at_start`: looks that it may
    miss before it has answered anything, where they are more than MISSED_LOOKS.
    """

    wants_opening: bool
    missed_at_start: int

    @property
    def pid(self) -> int: ...

    @property
    def connection(self) -> socket.socket | None:
        """None: no process is there yet."""

    async def gone(self) -> None:
        """To be called when the connection was lost. On return the process does nothing more of
        what it was sent: what it was about to commit is stored, or is not; but for a commit that a
        database server has received and not carried out yet, of which nobody hears."""

    async def renew(self, *, answered: bool) -> None:
        """Until there is a process to connect to. `answered`: whether anything was heard by the
        connection before, if any."""

    def kill(self) -> None: ...

    def finish(self, limit_s: float) -> None:
        """Once the loop has ended, and the connection with it. On return, after `limit_s` more
        seconds at most, the process writes nothing more of what it was sent."""


class _Sent(Submission):
    """`data`: its events, pickled; as objects they are the process' alone. `given_up`: why its
    caller waits no more; `abandoned`: whatever is answered. `tries`: processes that had it, and may
    have stored it; `sent_to`: the latest."""

    def __init__(self, number: int, turn_ids: list[str], data: bytes, writer: StoreWriter) -> None:
        super().__init__(size=len(data))
        self.number = number
        self.data = data
        self.given_up: str | None = None
        self.abandoned = False
        self.tries, self.sent_to = 0, 0
        self._turn_ids = turn_ids
        self._sender = writer

    def turn_ids(self) -> list[str]:
        return self._turn_ids

    def withdraw(self, reason: str) -> None:
        self._sender.withdraw(self, reason)

    def abandon(self) -> bool:
        return self._sender.abandon(self)


class StoreWriter:
    """`capture.recorder.EventWriter` for one event loop, the one that it is first used in.

    At the end of the `with`, which comes after that loop's, all is written that was submitted.
    """

    def __init__(
        self,
        link: WriterLink,
        opening: Opening,
        *,
        max_submissions: int = MAX_SUBMISSIONS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """The bounds: as `GroupCommitWriter`'s, of bytes as they are sent."""
        self._link = link
        self._opening = opening
        self._max_submissions, self._max_bytes = max_submissions, max_bytes
        self._numbers = count(1)
        self._outstanding: dict[int, _Sent] = {}  # in order
        self._held_bytes = self._refused = 0
        self._unacknowledged = 0
        self._doubtful: set[str] = set()  # that are not known to be marked
        self._doubted: dict[int, frozenset[str]] = {}  # by the number that was asked with
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._lost: asyncio.Future[None] | None = None  # what is connected
        self._tasks: list[asyncio.Task[None]] = []  # that the end of their loop cancels
        self._unanswered = 0  # looks
        self._heard = False  # anything of this process
        self._closed = False

    # What a proxy does with it

    def submit(self, events: Sequence[Event]) -> Submission:
        """Raises `StoreBusy` at once when too much waits, StoreUnavailable after `close`,
        EventRejected for events that have no bytes."""
        if self._closed:
            raise StoreUnavailable("the store's writer is closed")
        data = _bytes_of(events)
        size, held = self._held_bytes + len(data), len(self._outstanding)
        if held and (held >= self._max_submissions or size > self._max_bytes):
            self._refused += 1
            raise StoreBusy(
                f"{held} submissions of {self._held_bytes >> 20} MiB wait to be written,"
                f" and at most {self._max_submissions} of {self._max_bytes >> 20} MiB may"
            )
        turn_ids = [event.turn_id for event in events if isinstance(event, Turn)]
        submission = _Sent(next(self._numbers), turn_ids, data, self)
        self._outstanding[submission.number] = submission
        self._held_bytes = size
        if self._transport is not None:
            self._send(submission)
        elif not self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks = [
                loop.create_task(self._stay_connected()),
                loop.create_task(self._watch()),
            ]
        return submission

    def load(self) -> WriterLoad:
        held = len(self._outstanding)
        return WriterLoad(held, self._held_bytes, self._refused, self._unacknowledged)

    def withdraw(self, submission: _Sent, reason: str) -> None:
        if submission.done():
            return
        submission.given_up = reason
        if self._transport is not None:
            self._transport.write(encode(Kind.WITHDRAW, submission.number, reason.encode()))
        else:
            self._give_up(submission)

    def abandon(self, submission: _Sent) -> bool:
        if submission.done():
            return False
        submission.given_up = submission.given_up or "its caller had given up"
        submission.abandoned = True
        if self._transport is not None:
            self._transport.write(encode(Kind.ABANDON, submission.number))
        # Its answer may be on the way already: then nobody there hears the word above.
        self._doubt(submission)
        return True

    # The connection

    async def _stay_connected(self) -> None:
        if self._link.connection is None:
            await self._link.renew(answered=True)
        while True:
            await self._connect()
            assert self._lost is not None, "connected"
            await self._lost
            await self._link.gone()
            self._give_up_unwanted()
            await self._link.renew(answered=self._heard)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            assert self._link.connection is not None, "renewed"
            self._lost = loop.create_future()
            try:
                # Its own file: the loop closes what it is given, when it thinks fit.
                own = self._link.connection.dup()
                await loop.create_connection(lambda: _Connection(self), sock=own)
            except OSError as error:
                log.error("the store's writer cannot be reached: %s", error)
                await asyncio.sleep(_REACH_AGAIN_S)
            else:
                return

    def _give_up_unwanted(self) -> None:
        """Where no process has it any more."""
        self._doubted.clear()
        for submission in [each for each in self._outstanding.values() if each.given_up]:
            self._give_up(submission)
        first = next(iter(self._outstanding.values()), None)
        if first is not None and first.tries >= _MOST_TRIES:
            first.given_up = f"{first.tries} processes ended by writing it"
            self._give_up(first)

    def _connected(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._reader = FrameReader()
        self._unanswered, self._heard = 0, False
        if self._link.wants_opening:
            transport.write(encode(Kind.OPEN, payload=pickled(self._opening)))
        if self._doubtful:
            self._ask_to_mark(frozenset(self._doubtful))
        for submission in self._outstanding.values():
            self._send(submission)

    def _ask_to_mark(self, turn_ids: frozenset[str]) -> None:
        assert self._transport is not None, "connected"
        number = next(self._numbers)
        self._doubted[number] = turn_ids
        self._transport.write(encode(Kind.DOUBT, number, pickled(turn_ids)))

    def _send(self, submission: _Sent) -> None:
        assert self._transport is not None, "connected"
        if submission.sent_to != self._link.pid:
            submission.sent_to = self._link.pid
            submission.tries += 1
        first = head(Kind.SUBMIT, submission.number, submission.data)
        self._transport.writelines((first, submission.data))

    def _read(self, data: bytes) -> None:
        self._unanswered, self._heard = 0, True
        for frame in self._reader.feed(data):
            self._received(frame)

    def _received(self, frame: WireFrame) -> None:
        if frame.kind == Kind.UNACKNOWLEDGED:
            self._unacknowledged += frame.number
        elif (marked := self._doubted.pop(frame.number, None)) is not None:
            self._doubtful -= marked
        elif (submission := self._outstanding.get(frame.number)) is not None:
            self._answered(submission, frame.value() if frame.kind == Kind.FAILED else None)

    def _answered(self, submission: _Sent, error: Exception | None) -> None:
        if error is None and not submission.abandoned:
            self._doubtful.difference_update(submission.turn_ids())
        elif error is not None and submission.tries > 1:
            self._doubt(submission)  # a process before this one may have written it
        self._settle(submission, error)

    def _doubt(self, submission: _Sent) -> None:
        """Its caller is refused, and its turns may be stored: these are marked."""
        if turn_ids := submission.turn_ids():
            self._doubtful.update(turn_ids)
            if self._transport is not None:
                self._ask_to_mark(frozenset(turn_ids))

    def _settle(self, submission: _Sent, error: Exception | None) -> None:
        del self._outstanding[submission.number]
        self._held_bytes -= submission.size
        with suppress(InvalidStateError):
            if error is None:
                submission.set_result(None)
            else:
                submission.set_exception(error)

    def _give_up(self, submission: _Sent) -> None:
        """Where no process has it any more."""
        if submission.tries:
            self._doubt(submission)
        self._settle(submission, StoreUnavailable(submission.given_up or "it was not written"))

    def _disconnected(self) -> None:
        """The process has ended, or closed its end; or the loop has."""
        self._transport = None
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._transport is None:
                continue
            at_start = 0 if self._heard else self._link.missed_at_start
            if self._unanswered >= max(MISSED_LOOKS, at_start):
                log.error("the store's writer (process %d) does nothing", self._link.pid)
                self._link.kill()
                continue
            self._unanswered += 1
            self._transport.write(encode(Kind.PING, next(self._numbers)))

    # The end

    def close(self) -> None:
        """Once the loop has ended. What was submitted is written."""
        if self._closed:
            return
        self._closed, self._transport = True, None
        deadline = time.monotonic() + _END_S
        if (connection := self._link.connection) is not None:
            with suppress(OSError):
                self._hear_the_rest(connection, deadline)
        self._link.finish(max(0.0, deadline - time.monotonic()))
        if self._outstanding or self._doubtful:
            self._write_the_rest()

    def _hear_the_rest(self, connection: socket.socket, deadline: float) -> None:
        """The answers to all that the process was sent: then it hangs up."""
        connection.settimeout(_END_S)
        connection.sendall(encode(Kind.BYE))
        connection.shutdown(socket.SHUT_WR)
        while (left_s := deadline - time.monotonic()) > 0:
            connection.settimeout(left_s)
            if not (data := connection.recv(_READ_BYTES)):
                return
            self._read(data)

    def _write_the_rest(self) -> None:
        """Here: what the loop had not sent, or whose answers it did not get."""
        for submission in [each for each in self._outstanding.values() if each.given_up]:
            self._give_up(submission)
        left = list(self._outstanding.values())
        with (
            Store.attach(self._opening.url) as store,
            GroupCommitWriter(
                store,
                max_submissions=sys.maxsize,
                max_bytes=sys.maxsize,
                reconnect_s=self._opening.reconnect_s,
            ) as writer,
        ):
            marked = writer.doubt(self._doubtful)
            written = [writer.submit(pickle.loads(each.data), size=each.size) for each in left]
        for submission, done in zip(left, written, strict=True):
            if (error := done.exception()) is not None:
                log.error("events are lost: %s", error)
            self._settle(submission, error if isinstance(error, Exception) else None)
        if not marked.done():
            log.error("%d turns without acknowledgement are not marked", len(self._doubtful))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Connection(asyncio.Protocol):
    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._writer._connected(transport)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        self._writer._read(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._writer._disconnected()


def _bytes_of(events: Iterable[Event]) -> bytes:
    try:
        return pickled(tuple(events))
    except RecursionError:
        raise EventRejected("an event holds values that are nested too deeply for JSON") from None
    except Exception as error:
        raise EventRejected(f"an event holds a value that cannot be stored: {error}") from error
