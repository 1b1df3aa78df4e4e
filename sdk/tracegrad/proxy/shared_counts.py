"""Counts that several processes add to, each to a cell of its own: nobody takes a lock."""

from __future__ import annotations

import mmap
from collections.abc import MutableSequence

_CELL_BYTES = 8


class SharedCount:
    """`cells[own]` is this process's to write; the count is the sum of all."""

    __slots__ = ("_cells", "_own")

    def __init__(
        self, cells: MutableSequence[int] | memoryview | None = None, own: int = 0
    ) -> None:
        """Without `cells` it is the process's alone."""
        self._cells: MutableSequence[int] | memoryview = [0] if cells is None else cells
        self._own = own

    def add(self, number: int) -> None:
        self._cells[self._own] += number

    def total(self) -> int:
        return sum(self._cells)

    def of(self, worker: int) -> int:
        """One worker's part."""
        return int(self._cells[worker])

    def reset(self, worker: int) -> None:
        """The worker is gone, and nobody else writes its cell."""
        self._cells[worker] = 0


class SharedCounts:
    """Made before the workers are forked: `counts` rows of one cell for each of them."""

    def __init__(self, workers: int, counts: int) -> None:
        self._workers = workers
        self._counts = counts
        self._cells = memoryview(mmap.mmap(-1, _CELL_BYTES * workers * counts)).cast("q")

    def count(self, row: int, worker: int) -> SharedCount:
        """One row, as the worker adds to it."""
        start = row * self._workers
        return SharedCount(self._cells[start : start + self._workers], worker)

    def reset(self, worker: int) -> None:
        """To be called by the one who started the worker, when it has ended."""
        for row in range(self._counts):
            self.count(row, worker).reset(worker)
