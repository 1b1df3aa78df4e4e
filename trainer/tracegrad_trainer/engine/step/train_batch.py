"""A whole batch on all ranks: rank 0's rows shared out, and the optimizer steps on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch.distributed as dist

from tracegrad_trainer.batches import (
    MicroBatch,
    PackingRule,
    Row,
    mini_batches,
    pack,
    packing_stats,
    shares_rows,
)
from tracegrad_trainer.engine.step.epochs import train_epochs
from tracegrad_trainer.engine.step.learner import Learner
from tracegrad_trainer.engine.step.rank_context import RankContext
from tracegrad_trainer.engine.step.result import StepResult
from tracegrad_trainer.utils.distributed import run_on_rank_zero


def train_batch(
    learner: Learner,
    rows: Sequence[Row] | None,
    *,
    version: int,
    budget: int,
    mismatched: Sequence[Row] = (),
    seed: int = 0,
    share: float = 1.0,
) -> StepResult:
    """The optimizer steps on rank 0's `rows` (None on the others), packed to `budget` tokens:
    one, or as many as `optim.minibatches` and `optim.epochs` ask for, `seed` deciding which.

    `mismatched` (rank 0's too, for one step only) as in `Learner.update`. `StepResult.dropped`
    are indices into `rows`; the metrics say how well they were packed, too.
    `share` (rank 0's, above 0): how much of a whole step each of them is.
    """
    optim = learner.optim
    parts: list[list[int]] | None = None
    if rows is not None:
        # By the number of optimizer steps so far, not by a generator's state: what was done for
        # a batch that changed nothing must leave no trace.
        parts = mini_batches(rows, optim.minibatches, seed=f"{seed} step {learner.steps}")
    share = run_on_rank_zero(lambda: share)
    rule = learner.engine.packing
    shared = run_on_rank_zero(lambda: _shares_rows(rule, rows, parts, budget=budget))
    budget = budget * rule.group if shared else budget
    with learner.sharing_rows(shared):
        own, how_packed = _deal(learner.engine, rows, parts, budget=budget)
        if len(own) * optim.epochs > 1:
            done = train_epochs(learner, own, epochs=optim.epochs, version=version, share=share)
        else:
            looked_at: list[MicroBatch] = []
            if "kto_z" in learner.objective.needs:
                looked_at, _ = deal_rows(learner.engine, mismatched, budget=budget)
            [only] = own
            done = learner.train(only, version=version, mismatched=looked_at, share=share)
    return replace(done, metrics=how_packed | done.metrics | {"step_share": share})


def _shares_rows(
    rule: PackingRule,
    rows: Sequence[Row] | None,
    parts: Sequence[Sequence[int]] | None,
    *,
    budget: int,
) -> bool:
    """Rank 0's: whether ranks share micro-batches in these steps."""
    assert rows is not None
    assert parts is not None
    of_parts = [[rows[i] for i in part] for part in parts]
    return shares_rows(of_parts, ranks=dist.get_world_size(), budget=budget, rule=rule)


def deal_rows(
    engine: RankContext, rows: Sequence[Row] | None, *, budget: int
) -> tuple[list[MicroBatch], dict[str, float]]:
    """This rank's share of rank 0's `rows` (None on the others), and how well all were packed."""
    parts = None if rows is None else [list(range(len(rows)))]
    [own], stats = _deal(engine, rows, parts, budget=budget)
    return own, stats


def _deal(
    engine: RankContext,
    rows: Sequence[Row] | None,
    parts: Sequence[Sequence[int]] | None,
    *,
    budget: int,
) -> tuple[list[list[MicroBatch]], dict[str, float]]:
    """The same of each part of the rows, by their numbers."""
    shares: list[tuple[list[list[MicroBatch]], dict[str, float]]] | None = None
    if dist.get_rank() == 0:
        assert rows is not None
        assert parts is not None
        rule = engine.packing
        ranks, alike = engine.data.size(), dist.get_world_size() // engine.data.size()
        packed = [
            pack([rows[i] for i in part], ranks=ranks, budget=budget, keys=part, rule=rule)
            for part in parts
        ]
        by_rank = list(zip(*packed, strict=True))
        stats = packing_stats(
            [[*chain(*of_parts)] for of_parts in by_rank], budget=budget, parity=rule.parity
        ) | {"ranks_a_micro_batch": float(alike)}
        # Neighbours share micro-batches (`ContextParallel`).
        shares = [(list(of_parts), stats) for of_parts in by_rank for _ in range(alike)]
    received: list[Any] = [None]
    dist.scatter_object_list(received, shares, src=0)
    found: tuple[list[list[MicroBatch]], dict[str, float]] = received[0]
    return found
