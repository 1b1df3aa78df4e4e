"""Group commit: many callers, one thread, one transaction for all that waits.

A submission goes from waiting to writing to committing, and is settled with what became of it. A
caller that gives up withdraws it, and then knows at once, but for a commit that is on its way:

- waiting: it is never written;
- writing: its turns are marked `unacknowledged` in the very transaction that writes them;
- committing: nobody knows yet. The caller waits a little longer; one that does not *abandons* it,
  and its turns are marked as soon as they are known to be stored. The same is done where a
  connection broke in a commit.

So a client that was refused has no turn that is trained. One that writes the same turn again, and
is answered that it is stored, has one: then the mark is taken back.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import fields
from enum import Enum, auto
from functools import partial
from types import NoneType
from typing import Any, NamedTuple, Protocol, Self

from sqlalchemy import Connection

from tracegrad.events import Event, Turn
from tracegrad.store.errors import StoreBusy, StoreLost, StoreUnavailable
from tracegrad.store.write.events import clear_unacknowledged, mark_unacknowledged

log = logging.getLogger("tracegrad.store")

# So many submissions at most share a transaction: bounds what one commit may lose or delay.
_MAX_BATCH = 512
# What waits or is being written, in all. More is refused at once instead of filling the memory.
MAX_SUBMISSIONS = 4096
MAX_BYTES = 256 << 20
# Between two attempts to mark turns of which nobody knows whether they are stored.
_UNCERTAIN_RETRY_S = 0.5
# Between two attempts to write a batch whose server is gone.
_RECONNECT_EVERY_S = 0.25
# For `estimate_bytes`: of a value that holds no text; and of an event with more values than are
# looked at.
_VALUE = 64
_MOST_VALUES = 20_000
_LARGE = 16 << 20
# Made once; what is a dict is so found before it is asked whether it is any other mapping.
_TEXTS, _SEQUENCES, _MAPPINGS = (str, bytes), (list, tuple), (dict, Mapping)
# Most values of an answer; asking whether one is a Mapping costs ten times as much as this.
_SCALARS = frozenset({int, float, bool, NoneType})
_TOO_LATE = "its caller had given up before it was stored"


class WritableStore(Protocol):
    def append(
        self,
        events: Sequence[Event],
        *,
        before_commit: Callable[[Connection, Sequence[str]], None] | None = None,
    ) -> None: ...
    def mark_unacknowledged(self, turn_ids: Sequence[str]) -> int: ...


class _Stage(Enum):
    WAITING = auto()
    WRITING = auto()
    COMMITTING = auto()
    WITHDRAWN = auto()  # while it was being written
    SETTLED = auto()


class Submission(Future[None]):
    """Events of one caller, which stand or fall together.

    Resolves when they are on the disk; fails with `EventRejected`, or with `StoreUnavailable`: then
    none of its turns will be trained. `size`: bytes that they take up; estimated where it is None.
    """

    def __init__(
        self,
        events: Sequence[Event] = (),
        writer: GroupCommitWriter | None = None,
        *,
        size: int | None = None,
    ) -> None:
        super().__init__()
        # A future that runs cannot be cancelled: the thread is free to resolve it.
        self.set_running_or_notify_cancel()
        self.events = tuple(events)
        self._writer = writer
        if size is None:
            size = sum(map(estimate_bytes, self.events)) if writer is not None else 0
        self.size = size
        self._stage = _Stage.WAITING
        self._given_up = self._abandoned = False

    def withdraw(self, reason: str) -> None:
        """Fails with StoreUnavailable and this reason, unless it is settled or its commit is on
        its way: then it is settled by that."""
        if self._writer is not None:
            self._writer._withdraw(self, reason)

    def abandon(self) -> bool:
        """Withdrawn, and nobody waits any longer for its commit. False: it is settled."""
        return self._writer is None or self._writer._abandon(self)

    def turn_ids(self) -> list[str]:
        return [event.turn_id for event in self.events if isinstance(event, Turn)]


class _Doubt(NamedTuple):
    turn_ids: frozenset[str]
    marked: Future[None]


class WriterLoad(NamedTuple):
    """What a writer has to do, and what it could not do so far."""

    submissions: int  # that wait, or are being written
    bytes: int  # that they take up, estimated
    refused: int  # submissions, because too much waited
    unacknowledged: int  # turns that were stored after their callers had given up


class GroupCommitWriter:
    """Writes events to a store from one thread of its own.

    While one transaction commits, submissions gather; the next takes them all. The disk's
    slowest part, its flush, is so paid once for many callers.
    """

    def __init__(
        self,
        store: WritableStore,
        *,
        max_submissions: int = MAX_SUBMISSIONS,
        max_bytes: int = MAX_BYTES,
        reconnect_s: float = 0.0,
    ) -> None:
        """`max_submissions` and `max_bytes` (estimated) bound what waits or is being written; a
        single submission may be larger. `reconnect_s`: a batch is written again for so long while
        the store's server is gone, before it fails."""
        self._store = store
        self._reconnect_s = reconnect_s
        self._max_submissions, self._max_bytes = max_submissions, max_bytes
        self._queue: queue.SimpleQueue[Submission | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of all below, and of the states of submissions
        self._held = self._held_bytes = self._refused = self._unacknowledged = 0
        self._reported: list[_Doubt] = []
        self._closed = False
        # Of the thread alone: the turns that a transaction whose commit was sent makes trainable,
        # and those that may be so although their callers were refused.
        self._sent: set[str] = set()
        self._doubtful: set[str] = set()
        self._doubts: list[_Doubt] = []  # of others, among them
        self._thread = threading.Thread(target=self._run, name="tracegrad-writer", daemon=True)
        self._thread.start()

    def submit(self, events: Sequence[Event], *, size: int | None = None) -> Submission:
        """Raises `StoreBusy` at once when too much waits, StoreUnavailable after `close`.

        Cancelling a submission does not take it back: see `Submission.withdraw`. `size`: as
        `Submission`.
        """
        submission = Submission(events, self, size=size)
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store's writer is closed")
            size = self._held_bytes + submission.size
            if self._held and (self._held >= self._max_submissions or size > self._max_bytes):
                self._refused += 1
                raise StoreBusy(
                    f"{self._held} submissions of {self._held_bytes >> 20} MiB wait to be written,"
                    f" and at most {self._max_submissions} of {self._max_bytes >> 20} MiB may"
                )
            self._held += 1
            self._held_bytes = size
            self._queue.put(submission)
        return submission

    def doubt(self, turn_ids: Iterable[str]) -> Future[None]:
        """Turns that another writer may have stored, and whose callers were refused: those that
        are stored are marked `unacknowledged`. Resolves when that is done, however long the store
        cannot be written."""
        reported = _Doubt(frozenset(turn_ids), Future())
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store's writer is closed")
            self._reported.append(reported)
            self._held += 1
            self._queue.put(Submission(size=0))  # nothing to write: it wakes the thread
        return reported.marked

    def load(self) -> WriterLoad:
        with self._lock:
            return WriterLoad(self._held, self._held_bytes, self._refused, self._unacknowledged)

    def close(self) -> None:
        """Write what was submitted, then stop. The store stays open."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Of any thread

    def _withdraw(self, submission: Submission, reason: str) -> None:
        with self._lock:
            if submission._stage is _Stage.WAITING:
                self._release(submission)
            elif submission._stage is _Stage.WRITING:
                submission._stage = _Stage.WITHDRAWN
            else:
                submission._given_up = True
                return
        _fail([submission], StoreUnavailable(reason))

    def _abandon(self, submission: Submission) -> bool:
        with self._lock:
            submission._given_up = submission._abandoned = True
            return submission._stage is _Stage.COMMITTING

    def _release(self, submission: Submission) -> None:
        """With the lock held."""
        submission._stage = _Stage.SETTLED
        submission.events = ()
        self._held -= 1
        self._held_bytes -= submission.size

    # Of the writer's own thread

    def _run(self) -> None:
        open_ = True
        while open_:
            try:
                first = self._queue.get(timeout=_UNCERTAIN_RETRY_S if self._doubtful else None)
            except queue.Empty:
                self._mark_uncertain()
                continue
            batch, open_ = self._gather(first)
            self._mark_uncertain()
            if batch:
                self._write(batch)
        self._mark_uncertain()

    def _gather(self, item: Submission | None) -> tuple[list[Submission], bool]:
        """What waits now, `item` before all. False after the last."""
        batch: list[Submission] = []
        while item is not None:
            with self._lock:
                if item._stage is _Stage.WAITING:
                    item._stage = _Stage.WRITING
                    batch.append(item)
            if len(batch) == _MAX_BATCH:
                return batch, True
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, True
        return batch, False

    def _write(self, batch: list[Submission]) -> None:
        try:
            self._append(batch)
        except Exception as error:
            # A store that cannot be written fails each of them; a bad event only its own.
            if len(batch) > 1 and not isinstance(error, StoreUnavailable):
                for submission in batch:
                    self._write_alone(submission)
            else:
                self._failed(batch, error)
        else:
            self._committed(batch)

    def _append(self, batch: list[Submission]) -> None:
        """Again while the server is gone; the batch loses those whose callers give up meanwhile. A
        commit that the server's end cut off may be stored: the same events again are no others."""
        deadline = time.monotonic() + self._reconnect_s
        while batch:
            self._sent = set()
            events = [event for submission in batch for event in submission.events]
            try:
                self._store.append(events, before_commit=partial(self._before_commit, batch))
                return
            except StoreLost as error:
                if time.monotonic() > deadline:
                    raise
                self._doubtful |= self._sent
                time.sleep(_RECONNECT_EVERY_S)
                batch[:] = self._still_wanted(batch, error)

    def _still_wanted(self, batch: list[Submission], error: StoreLost) -> list[Submission]:
        """The others fail."""
        with self._lock:
            wanted: list[Submission] = []
            given_up: list[Submission] = []
            for submission in batch:
                over = submission._given_up or submission._stage is _Stage.WITHDRAWN
                (given_up if over else wanted).append(submission)
            for submission in wanted:
                submission._stage = _Stage.WRITING
        self._failed(given_up, error)
        return wanted

    def _write_alone(self, submission: Submission) -> None:
        with self._lock:
            wanted = submission._stage is not _Stage.WITHDRAWN and not submission._given_up
            submission._stage = _Stage.WRITING
        if wanted:
            self._write([submission])
        else:
            self._failed([submission], StoreUnavailable(_TOO_LATE))

    def _before_commit(
        self, batch: list[Submission], connection: Connection, new: Sequence[str]
    ) -> None:
        """The last moment at which a caller's giving up can go into the transaction. It may come
        again, where the transaction was rolled back and is repeated."""
        with self._lock:
            for submission in batch:
                if submission._given_up:
                    submission._stage = _Stage.WITHDRAWN
                elif submission._stage is _Stage.WRITING:
                    submission._stage = _Stage.COMMITTING
            late = [s for s in batch if s._stage is _Stage.WITHDRAWN]
        _fail(late, StoreUnavailable(_TOO_LATE))
        wanted = _turn_ids(s for s in batch if s._stage is _Stage.COMMITTING)
        # A turn that was stored before stays what it was to the caller that got that answer.
        if refused := set(new) - wanted:
            mark_unacknowledged(connection, sorted(refused))
        known = wanted - set(new)
        cleared = clear_unacknowledged(connection, sorted(known)) if known else []
        self._sent = (wanted & set(new)) | set(cleared)

    def _committed(self, batch: list[Submission]) -> None:
        done: list[Submission] = []
        late: list[Submission] = []
        with self._lock:
            for submission in batch:
                if submission._stage is _Stage.WITHDRAWN:
                    self._unacknowledged += len(submission.turn_ids())
                    late.append(submission)
                elif submission._abandoned:
                    self._doubtful |= self._sent & _turn_ids([submission])
                    late.append(submission)
                else:
                    done.append(submission)
            acknowledged = _turn_ids(done)
            for submission in batch:
                self._release(submission)
        self._doubtful -= acknowledged
        self._sent = set()  # committed: a later failure says nothing about them
        for submission in done:
            submission.set_result(None)
        _fail(late, StoreUnavailable(_TOO_LATE))
        self._mark_uncertain()

    def _failed(self, batch: list[Submission], error: Exception) -> None:
        if isinstance(error, StoreUnavailable):
            self._doubtful |= self._sent
        with self._lock:
            for submission in batch:
                self._release(submission)
        _fail(batch, error)

    def _mark_uncertain(self) -> None:
        with self._lock:
            reported, self._reported = self._reported, []
        for doubt in reported:
            self._doubts.append(doubt)
            self._doubtful |= doubt.turn_ids
        if self._doubtful:
            marked = 0
            try:
                marked = self._store.mark_unacknowledged(sorted(self._doubtful))
            except StoreUnavailable:
                return  # again later
            except Exception:
                log.exception("turns that were acknowledged to nobody could not be marked")
            self._doubtful.clear()
            with self._lock:
                self._unacknowledged += marked
        for doubt in self._doubts:
            doubt.marked.set_result(None)
        self._doubts.clear()


def _turn_ids(submissions: Iterable[Submission]) -> set[str]:
    return {turn_id for submission in submissions for turn_id in submission.turn_ids()}


def _fail(batch: Sequence[Submission], error: Exception) -> None:
    for submission in batch:
        # One instance each: raising an exception writes into it.
        mine = StoreUnavailable(str(error)) if len(batch) > 1 else error
        with suppress(InvalidStateError):  # its caller knows already
            submission.set_exception(mine)


def estimate_bytes(event: Event) -> int:
    """In bytes. Texts and token arrays count as long as they are, everything else alike."""
    size, looked_at = 0, 0
    todo: list[Any] = [getattr(event, each.name) for each in fields(event)]
    while todo:
        value = todo.pop()
        size += _VALUE
        looked_at += 1
        if isinstance(value, _TEXTS):
            size += len(value)
        elif isinstance(value, array):
            size += len(value) * value.itemsize
        elif looked_at + len(todo) > _MOST_VALUES:
            return size + _LARGE
        elif type(value) in _SCALARS:
            continue
        elif isinstance(value, _SEQUENCES):
            todo += value
        elif isinstance(value, _MAPPINGS):
            todo += value.values()
    return size
