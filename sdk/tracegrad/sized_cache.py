"""What was made of large values of late, bounded by bytes: what comes again is not made again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class SizedCache(Generic[V]):
    """Safe to use from many threads. Values are shared: nobody may change them.

    cachetools' LRUCache takes six times as long to remember a value.
    """

    def __init__(self, most_bytes: int, *, smallest: int, largest: int) -> None:
        """`smallest`: bytes of a key that is worth a place. `largest`: bytes of one entry."""
        self._most_bytes, self._smallest, self._largest = most_bytes, smallest, largest
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[V, int]] = OrderedDict()
        self.size = 0  # bytes

    def get(self, key: bytes) -> V | None:
        with self._lock:
            found = self._known.get(key)
            if found is None:
                return None
            self._known.move_to_end(key)
            return found[0]

    def add(self, key: bytes, value: V, value_bytes: int) -> None:
        size = len(key) + value_bytes
        if len(key) < self._smallest or size > self._largest:
            return
        with self._lock:
            if key in self._known:
                return
            self._known[key] = value, size
            self.size += size
            while self.size > self._most_bytes:
                self.size -= self._known.popitem(last=False)[1][1]
