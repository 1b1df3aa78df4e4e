"""Group commit: many callers, one thread, one transaction for all that waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import NamedTuple, Self

from tracegrad.records import Fact
from tracegrad.store.errors import StoreUnavailable
from tracegrad.store.store import Store

# So many submissions at most share a transaction: bounds what one commit may lose or delay.
_MOST = 512


class _Submission(NamedTuple):
    facts: Sequence[Fact]
    done: Future[None]


class Writer:
    """Writes facts to a store from one thread of its own.

    While one transaction commits, submissions gather; the next takes them all. The disk's
    slowest part, its flush, is so paid once for many callers.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: queue.SimpleQueue[_Submission | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tracegrad-writer", daemon=True)
        self._thread.start()

    def submit(self, facts: Sequence[Fact]) -> Future[None]:
        """Resolves when the facts are on the disk; fails with `StoreUnavailable` or `FactRefused`.

        The facts of one submission stand or fall together. Cancelling the future does not
        take them back.
        """
        submission = _Submission(tuple(facts), Future())
        # A future that runs cannot be cancelled: the thread is free to resolve it.
        submission.done.set_running_or_notify_cancel()
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store's writer is closed")
            self._queue.put(submission)
        return submission.done

    def close(self) -> None:
        """Write what was submitted, then stop. The store stays open."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        open_ = True
        while open_:
            batch, open_ = self._gather()
            if batch:
                self._write(batch)

    def _gather(self) -> tuple[list[_Submission], bool]:
        """What waits now, at least one submission; False after the last."""
        batch: list[_Submission] = []
        item = self._queue.get()
        while item is not None:
            batch.append(item)
            if len(batch) == _MOST:
                return batch, True
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, True
        return batch, False

    def _write(self, batch: list[_Submission]) -> None:
        try:
            self._store.append([fact for submission in batch for fact in submission.facts])
        except Exception as error:
            # A store that cannot be written fails each of them; a bad fact only its own.
            if len(batch) > 1 and not isinstance(error, StoreUnavailable):
                for submission in batch:
                    self._write([submission])
            else:
                for submission in batch:
                    # One instance each: raising an exception writes into it.
                    mine = StoreUnavailable(str(error)) if len(batch) > 1 else error
                    submission.done.set_exception(mine)
        else:
            for submission in batch:
                submission.done.set_result(None)
