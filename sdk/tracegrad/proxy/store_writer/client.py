"""The store's writer as an event loop has it: events go to a process of their own and are answered.

What that process has not answered is kept, and given to the next one where it ends: events that are
stored already change nothing (`store.Store.append`). What a caller has given up is not written
again; the turns of it that may be stored are marked instead.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from itertools import count
from typing import Any, Self

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
from tracegrad.proxy.store_writer.process import WriterProcess
from tracegrad.store import (
    EventRejected,
    GroupCommitWriter,
    Store,
    StoreBusy,
    StoreUnavailable,
    Submission,
    WriterLoad,
)
from tracegrad.store.write.group_commit import MAX_BYTES, MAX_SUBMISSIONS, estimate_bytes

log = logging.getLogger("tracegrad.proxy")

# A process that does not answer so many looks in a row is killed, after half a minute: looks and
# not time, since a proxy that was stopped itself blames nobody. A store that hangs is no reason:
# answers to looks do not wait for it.
LOOK_EVERY_S = 5.0
MISSED_LOOKS = 6
MISSED_AT_START = 24  # a busy machine takes its time for an interpreter
# Before another process is started: at once after one that answered anything, else doubling.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0

# A submission that so many processes ended by, one after the other, is refused.
_MOST_TRIES = 5
# For a process whose end was seen by its socket: it may still say why.
_LAST_WORDS_S = 1.0
# For the last commits of a process that is not needed any more; then the proxy itself writes what
# is left. Less than the supervisor gives its workers.
_END_S = 5.0

Start = Callable[[], WriterProcess]


class _Sent(Submission):
    """`data`: its events, pickled; as objects they are the process' alone. `given_up`: why its
    caller waits no more; `abandoned`: whatever is answered. `tries`: processes that had it, and may
    have stored it."""

    def __init__(
        self, number: int, turn_ids: list[str], data: bytes, size: int, writer: StoreWriter
    ) -> None:
        super().__init__(size=size)
        self.number = number
        self.data = data
        self.given_up: str | None = None
        self.abandoned = False
        self.tries = 0
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
        process: WriterProcess,
        opening: Opening,
        *,
        start: Start,
        max_submissions: int = MAX_SUBMISSIONS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`start` gives the next process where one ends. The bounds: as `GroupCommitWriter`'s."""
        self._process = process
        self._opening = opening
        self._start = start
        self._max_submissions, self._max_bytes = max_submissions, max_bytes
        self._numbers = count(1)
        self._outstanding: dict[int, _Sent] = {}  # in order
        self._held_bytes = self._refused = 0
        self._unacknowledged = self._before = 0  # by this process, and by those before it
        self._doubtful: set[str] = set()  # that are not known to be marked
        self._doubted: dict[int, frozenset[str]] = {}  # by the number that was asked with
        self._transport: asyncio.Transport | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unanswered = 0  # looks
        self._failures = self._silent_ends = 0  # since anything was heard
        self._heard = False  # anything of this process
        self._closed = False

    # What a proxy does with it

    def submit(self, events: Sequence[Event]) -> Submission:
        """Raises `StoreBusy` at once when too much waits, StoreUnavailable after `close`,
        EventRejected for events that have no bytes."""
        if self._closed:
            raise StoreUnavailable("the store's writer is closed")
        data, mine = _bytes_of(events), sum(map(estimate_bytes, events))
        size, held = self._held_bytes + mine, len(self._outstanding)
        if held and (held >= self._max_submissions or size > self._max_bytes):
            self._refused += 1
            raise StoreBusy(
                f"{held} submissions of {self._held_bytes >> 20} MiB wait to be written,"
                f" and at most {self._max_submissions} of {self._max_bytes >> 20} MiB may"
            )
        turn_ids = [event.turn_id for event in events if isinstance(event, Turn)]
        submission = _Sent(next(self._numbers), turn_ids, data, mine, self)
        self._outstanding[submission.number] = submission
        self._held_bytes = size
        if self._transport is not None:
            self._send(submission)
        elif self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._start_task(self._connect())
            self._start_task(self._watch())
        return submission

    def load(self) -> WriterLoad:
        unacknowledged = self._before + self._unacknowledged
        return WriterLoad(len(self._outstanding), self._held_bytes, self._refused, unacknowledged)

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

    def _start_task(self, work: Any) -> None:
        assert self._loop is not None, "in use"
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> None:
        assert self._loop is not None, "in use"
        while True:
            try:
                # Its own file: the loop closes what it is given, when it thinks fit.
                connection = self._process.connection.dup()
            except OSError as error:
                log.error("the store's writer cannot be reached: %s", error)
                await self._pause()
            else:
                await self._loop.create_connection(lambda: _Connection(self), sock=connection)
                return

    async def _pause(self) -> None:
        """After so many failures without an answer between them."""
        pause_s = _FIRST_PAUSE_S * 2.0 ** min(self._failures, 10)
        self._failures += 1
        await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))

    def _connected(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._unanswered, self._heard = 0, False
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
        submission.tries += 1
        first = head(Kind.SUBMIT, submission.number, submission.data)
        self._transport.writelines((first, submission.data))

    def _received(self, frame: WireFrame) -> None:
        self._unanswered = self._failures = self._silent_ends = 0
        self._heard = True
        if frame.kind == Kind.UNACKNOWLEDGED:
            self._unacknowledged = frame.number
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

    def _lost(self) -> None:
        """The process has ended, or closed its end; or the loop has."""
        self._transport = None
        if self._loop is not None and not self._loop.is_closed() and not self._closed:
            self._start_task(self._again())

    async def _again(self) -> None:
        # What it was about to commit is stored, or is not, once it is gone; but for a commit that a
        # database server has received and not carried out yet, of which nobody hears.
        await asyncio.to_thread(self._end_process)
        log.error(
            "the store's writer (process %d) %s; it is started again",
            self._process.pid,
            self._process.how_it_ended(),
        )
        self._before, self._unacknowledged = self._before + self._unacknowledged, 0
        self._doubted.clear()
        for submission in [each for each in self._outstanding.values() if each.given_up]:
            self._give_up(submission)
        first = next(iter(self._outstanding.values()), None)
        if first is not None and first.tries >= _MOST_TRIES:
            first.given_up = f"{first.tries} processes ended by writing it"
            self._give_up(first)
        if self._silent_ends:
            await self._pause()
        self._silent_ends += 1
        while True:
            try:
                self._process = self._start()
            except Exception as error:
                log.error("the store's writer cannot be started: %s", error)
                await self._pause()
            else:
                return await self._connect()

    def _end_process(self) -> None:
        """It may have ended already, or be about to."""
        if self._process.wait(_LAST_WORDS_S) is None:
            self._process.kill()
            self._process.wait()
        self._process.hang_up()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._transport is None:
                continue
            if self._unanswered >= (MISSED_LOOKS if self._heard else MISSED_AT_START):
                log.error("the store's writer (process %d) does nothing", self._process.pid)
                self._process.kill()
                continue
            self._unanswered += 1
            self._transport.write(encode(Kind.PING, next(self._numbers)))

    # The end

    def close(self) -> None:
        """Once the loop has ended. What was submitted is written, and its process gone."""
        if self._closed:
            return
        self._closed, self._transport = True, None
        self._process.hang_up()
        if self._process.wait(_END_S) is None:
            self._process.kill()
            self._process.wait()
        if self._outstanding or self._doubtful:
            self._write_the_rest()

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
        self._reader = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._writer._connected(transport)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            self._writer._received(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._writer._lost()


def _bytes_of(events: Iterable[Event]) -> bytes:
    try:
        return pickled(tuple(events))
    except RecursionError:
        raise EventRejected("an event holds values that are nested too deeply for JSON") from None
    except Exception as error:
        raise EventRejected(f"an event holds a value that cannot be stored: {error}") from error
