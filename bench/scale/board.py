"""Numbers that the processes of a run share: the virtual clock, and what each of them counts.

Each is a double in a file that all of them map. A cell is written by one process and one thread,
and read by whoever likes: nobody takes a lock. Imports nothing of tracegrad's (`clock`).
"""

from __future__ import annotations

import mmap
from enum import IntEnum, auto
from pathlib import Path

_CELL_BYTES = 8


class Cell(IntEnum):
    """`NOW` is the simulation's: virtual seconds since the epoch. The writer's are counted in the
    proxy (`proxy`), bytes of HTTP in the engine."""

    NOW = 0
    WRITER_S = auto()
    WRITER_CPU_S = auto()
    WRITER_DELAY_S = auto()
    COMMITS = auto()
    EVENTS = auto()
    TURNS = auto()
    ENGINE_BYTES_IN = auto()
    ENGINE_BYTES_OUT = auto()


class Board:
    def __init__(self, path: Path) -> None:
        """`path`: a file that `create` made."""
        self.path = path
        with path.open("r+b") as file:
            self._cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")

    @classmethod
    def create(cls, path: Path) -> Board:
        path.write_bytes(bytes(_CELL_BYTES * len(Cell)))
        return cls(path)

    def __getitem__(self, cell: Cell) -> float:
        return self._cells[cell]

    def __setitem__(self, cell: Cell, value: float) -> None:
        self._cells[cell] = value

    def add(self, cell: Cell, value: float) -> None:
        self._cells[cell] += value
