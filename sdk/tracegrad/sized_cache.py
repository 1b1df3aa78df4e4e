"""What was made of large values of late, bounded by bytes and by age: what comes again is not made
again."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

V = TypeVar("V")

# What nobody has asked for in so long is dropped with the next addition: attempts at one task, and
# turns of one rollout, follow each other within minutes.
UNUSED_S = 300.0


@dataclass(slots=True, eq=False)
class _Entry(Generic[V]):
    key: bytes
    value: V
    size: int  # bytes, with its key
    used: float  # when it was asked for last


class SizedCache(Generic[V]):
    """Safe to use from many threads. Values are shared: nobody may change them.

    cachetools' LRUCache takes six times as long to remember a value.
    """

    def __init__(
        self,
        most_bytes: int,
        *,
        smallest: int,
        largest: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`smallest`: bytes of a key that is worth a place. `largest`: bytes of one entry."""
        self._most_bytes, self._smallest, self._largest = most_bytes, smallest, largest
        self._clock = clock
        self._lock = threading.Lock()
        # What was asked for last is at the end.
        self._known: OrderedDict[bytes, _Entry[V]] = OrderedDict()
        self.size = 0  # bytes

    def get(self, key: bytes) -> V | None:
        with self._lock:
            found = self._known.get(key)
            if found is None:
                return None
            found.used = self._clock()
            # By its own key: an equal one is compared byte by byte once more.
            self._known.move_to_end(found.key)
            return found.value

    def add(self, key: bytes, value: V, value_bytes: int) -> None:
        size = len(key) + value_bytes
        if len(key) < self._smallest or size > self._largest:
            return
        with self._lock:
            if key in self._known:
                return
            now = self._clock()
            self._known[key] = _Entry(key, value, size, now)
            self.size += size
            self._drop(now - UNUSED_S)

    def _drop(self, unused_since: float) -> None:
        while self._known:
            oldest = next(iter(self._known.values()))
            if self.size <= self._most_bytes and oldest.used >= unused_since:
                return
            del self._known[oldest.key]
            self.size -= oldest.size
