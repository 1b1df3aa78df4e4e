"""Sums and maxima of a step, over its micro-batches and then over all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from tracegrad_trainer.engine.step.rank_context import RankContext


@dataclass(slots=True)
class LossTotals:
    """In double precision: what is added must not depend on how rows were packed."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, more: dict[str, Tensor], largest: dict[str, Tensor]) -> None:
        for name, value in more.items():
            value = value.detach().double()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in largest.items():
            value = value.detach().double()
            known = self.maxima.get(name)
            self.maxima[name] = value if known is None else torch.maximum(known, value)

    def all_reduced(self, engine: RankContext) -> tuple[dict[str, float], dict[str, float]]:
        """Over all ranks. A step whose rows all are finite reads nothing else off its device."""
        added = engine.all_reduce_sum(torch.stack(list(self.sums.values())))
        highest = engine.all_reduce_sum(torch.stack(list(self.maxima.values())), dist.ReduceOp.MAX)
        return (
            dict(zip(self.sums, added.tolist(), strict=True)),
            dict(zip(self.maxima, highest.tolist(), strict=True)),
        )
