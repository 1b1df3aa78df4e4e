"""From rollouts as the store loads them to packed micro-batches."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from bench.trainer.ours import rows
from bench.trainer.rollouts import Shape
from bench.trainer.work import Work
from tracegrad_trainer.batches import pack


@dataclass(frozen=True, slots=True)
class Building:
    """The median of some times."""

    shape: Shape
    rollouts: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def building(shape: Shape, work: Work, times: int) -> Building:
    tokens = work.tokens
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        pack(rows(work), ranks=2, budget=work.budget)
        taken.append(time.perf_counter() - start)
    return Building(shape, len(work.attempts), tokens, statistics.median(taken))
