"""What the workers of one proxy tell each other: a log in memory that all of them map.

Each worker writes a ring of its own and reads those of the others, so nobody takes a lock, and a
worker that is killed leaves its ring readable. A worker publishes before it answers its client, and
catches up before it decides about a request: whatever a client has seen the end of is known to the
worker that gets its next request.

A ring holds records, the oldest from `tail`, the next at `head` (positions that only grow, in
bytes). A record is its length and that many bytes. The writer moves `tail` before it overwrites
anything and `head` after all of a record is there; a reader copies first and looks at `tail` again
before it believes the copy. A reader that is overtaken has lost records: its caches forget
everything, and the store is read instead.
"""

from __future__ import annotations

import logging
import marshal
import mmap
import struct
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

log = logging.getLogger("tracegrad.proxy")

# Bytes of one worker's ring: some hundred turns of 32k tokens, which others read within a second.
RING_BYTES = 32 << 20
_POSITIONS = 16  # bytes before a ring: its head and its tail
_LENGTH = struct.Struct("=I")
_SKIP = 0xFFFFFFFF  # in place of a length: the next record is at the ring's start

Handler = Callable[..., object]


class SharedLog:
    """Made before the workers are forked; `join` makes one of them its writer. Of one event loop.

    Records are written with `marshal`, which only processes of one interpreter can read: the
    workers are forks of one.
    """

    def __init__(self, workers: int, *, ring_bytes: int = RING_BYTES) -> None:
        self._rings = [_Ring(ring_bytes) for _ in range(workers)]
        self._own: _Ring | None = None
        self._read = [0] * workers
        self._handlers: defaultdict[str, list[Handler]] = defaultdict(list)
        self._forget: list[Callable[[], None]] = []

    def join(self, worker: int) -> None:
        """To be called once, in the worker's own process, behind every `subscribe`: what is in the
        rings yet is read, its predecessor's words too."""
        self._read = [ring.tail for ring in self._rings]
        for number, ring in enumerate(self._rings):
            self._read_ring(number, ring)
        self._own = self._rings[worker]

    def subscribe(self, kind: str, handler: Handler) -> None:
        """`handler(*args)` of what others publish under this kind."""
        self._handlers[kind].append(handler)

    def when_lost(self, forget: Callable[[], None]) -> None:
        """Called when others' words were lost: what a cache has may be less than the store has."""
        self._forget.append(forget)

    def publish(self, kind: str, *args: Any) -> bool:
        """On return every other worker finds it. False: it is larger than the ring takes."""
        if self._own is None:
            return False
        return self._own.append(marshal.dumps((kind, args)))

    def catch_up(self) -> None:
        """Hand what others published since the last time to its handlers; nothing before `join`,
        which must find all caches there."""
        if self._own is None:
            return
        for number, ring in enumerate(self._rings):
            if ring is not self._own and ring.head != self._read[number]:
                self._read_ring(number, ring)

    def _read_ring(self, number: int, ring: _Ring) -> None:
        while (position := self._read[number]) != ring.head:
            found = ring.record_at(position)
            if found is None:
                log.warning("the words of another worker were lost: what it wrote is read again")
                self._read[number] = ring.head
                for forget in self._forget:
                    forget()
                return
            data, self._read[number] = found
            if data:
                kind, args = marshal.loads(data)
                for handler in self._handlers[kind]:
                    handler(*args)


class _Ring:
    """Written by one process at a time, read by others."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._memory = mmap.mmap(-1, _POSITIONS + size)
        self._positions = memoryview(self._memory)[:_POSITIONS].cast("Q")
        self._data = memoryview(self._memory)[_POSITIONS:]
        self._order = threading.Lock()
        self._order.acquire()

    @property
    def head(self) -> int:
        return self._positions[0]

    @property
    def tail(self) -> int:
        return self._positions[1]

    def append(self, data: bytes) -> bool:
        needed = _LENGTH.size + len(data)
        if needed > self._size // 4:
            return False
        head = self.head
        left = self._size - head % self._size
        if left < needed:
            self._make_room(head + left)
            if left >= _LENGTH.size:
                _LENGTH.pack_into(self._data, head % self._size, _SKIP)
            head += left
        self._make_room(head + needed)
        start = head % self._size
        _LENGTH.pack_into(self._data, start, len(data))
        self._data[start + _LENGTH.size : start + needed] = data
        self._barrier()
        self._positions[0] = head + needed
        return True

    def record_at(self, position: int) -> tuple[bytes, int] | None:
        """The record, and where the next is; empty for a skip. None: it is overwritten."""
        self._barrier()
        start = position % self._size
        left = self._size - start
        if left < _LENGTH.size:
            data, after = b"", position + left
        else:
            (length,) = _LENGTH.unpack_from(self._data, start)
            if length == _SKIP:
                data, after = b"", position + left
            else:
                begin = start + _LENGTH.size
                data, after = bytes(self._data[begin : begin + length]), begin + length
                after += position - start
        self._barrier()
        return (data, after) if position >= self.tail else None

    def _make_room(self, end: int) -> None:
        """Give up the oldest records, so that all before `end` may be written."""
        tail = self.tail
        if end - tail <= self._size:
            return
        while end - tail > self._size:
            found = self.record_at(tail)
            assert found is not None, "only its writer moves the tail"
            tail = found[1]
        self._positions[1] = tail
        self._barrier()

    def _barrier(self) -> None:
        """Processors may reorder what a process stores, but not over a lock that is given and
        taken: a reader must not see a position before what it stands for."""
        self._order.release()
        self._order.acquire()
