"""Forward and backward over a rank's micro-batches: gradients of a sum, nothing divided yet, and
the sums and maxima of the step's metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from tracegrad_trainer.batches import MicroBatch
from tracegrad_trainer.engine.model.forward import (
    ModelInputs,
    TargetContext,
    forward,
    loss_tokens_of,
)
from tracegrad_trainer.engine.model.parallelize import set_gradient_sync
from tracegrad_trainer.engine.step.rank_context import RankContext
from tracegrad_trainer.losses import ObjectiveSettings, Tokens, compute_loss
from tracegrad_trainer.losses.diagnostics import (
    diagnostic_maxima,
    diagnostic_sums,
    gap_histogram,
)

GAP_HISTOGRAM = "gap_histogram"


@dataclass(slots=True)
class LossTotals:
    """In double precision: what is added must not depend on how rows were packed. Of a sum that is
    a vector the entries come back as `name_0`, `name_1`, …"""

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
        added = engine.all_reduce_sum(torch.cat([each.flatten() for each in self.sums.values()]))
        highest = engine.all_reduce_sum(torch.stack(list(self.maxima.values())), dist.ReduceOp.MAX)
        return (
            dict(zip(_entries(self.sums), added.tolist(), strict=True)),
            dict(zip(self.maxima, highest.tolist(), strict=True)),
        )


def _entries(sums: Mapping[str, Tensor]) -> Iterator[str]:
    for name, value in sums.items():
        yield from [name] if value.dim() == 0 else [f"{name}_{i}" for i in range(value.numel())]


@dataclass(slots=True)
class Accumulated:
    """`non_finite`: of each micro-batch where a target has a number that is not finite."""

    totals: LossTotals = field(default_factory=LossTotals)
    non_finite: list[Bool[Tensor, " _"]] = field(default_factory=list)


def rows_to_drop(
    engine: RankContext,
    objective: ObjectiveSettings,
    wrong: Sequence[Bool[Tensor, " _"]],
    micro_batches: Sequence[MicroBatch],
) -> list[int]:
    """Keys of the rows, on any rank, that hold such targets, and of those paired with them. Where
    something is summed over rollouts, one of these leaves whole. A collective."""
    rows = [batch.row[here.cpu().numpy()] for here, batch in zip(wrong, micro_batches, strict=True)]
    rollouts: list[int] = []
    if objective.sums_rollouts:
        mine = [batch.rollout_keys[row] for row, batch in zip(rows, micro_batches, strict=True)]
        rollouts = engine.gather_unique(np.concatenate([*mine, np.zeros(0, np.int64)]).tolist())
    found: set[int] = set()
    for row, batch in zip(rows, micro_batches, strict=True):
        keys = batch.row_keys
        gone = np.union1d(keys[row], keys[np.isin(batch.rollout_keys, rollouts)])
        left, _ = batch.without_rows(gone.tolist())
        found |= set(keys.tolist()) - set(left.row_keys.tolist())
    return engine.gather_unique(sorted(found))


def accumulate(
    engine: RankContext,
    objective: ObjectiveSettings,
    inputs: Sequence[ModelInputs],
    before: Sequence[TargetContext],
    *,
    version: int,
    reshard: bool,
    entropy_coef: float | None = None,
) -> Accumulated:
    """Adds to the parameters' gradients; `version` is the current policy version, `entropy_coef` as
    in `compute_loss`."""
    done = Accumulated()
    values = "value" in objective.needs
    for i, one in enumerate(inputs):
        set_gradient_sync(engine.model, last=i == len(inputs) - 1, reshard=reshard)
        now = forward(
            engine.model, one, engine.head, values=values, entropy_gradient=objective.has_entropy
        )
        tokens = loss_tokens_of(one, now, before[i])
        loss = compute_loss(objective, tokens, entropy_coef=entropy_coef)
        assert objective.sums_rollouts or not loss.rollout_sums
        # Where nothing is learnt there is a backward too, for the collectives.
        total = (
            loss.total if loss.total.requires_grad else loss.total + now.policy_logprobs.sum() * 0
        )
        torch.autograd.backward(total)
        with torch.no_grad():
            wrong = not_finite(_given(tokens))
            more = diagnostic_sums(tokens, loss, now.entropy.detach(), version) | {
                "wrong": wrong.sum(),
                GAP_HISTOGRAM: gap_histogram(tokens, version),
            }
            done.totals.add(more, diagnostic_maxima(tokens, loss, version))
            done.non_finite.append(wrong)
    return done


def _given(tokens: Tokens) -> list[Float[Tensor, " n"] | None]:
    """The targets' numbers of a forward or of the serving engine."""
    known = [tokens.policy_logprobs, tokens.old_logprobs, tokens.rollout_logprobs]
    return [*known, tokens.reference_logprobs, tokens.value, tokens.old_value]


def not_finite(given: Sequence[Float[Tensor, " n"] | None]) -> Bool[Tensor, " n"]:
    """Where any of these is no finite number; the first is there."""
    assert given[0] is not None
    finite = torch.ones_like(given[0], dtype=torch.bool)
    for values in given:
        if values is not None:
            finite &= torch.isfinite(values)
    return ~finite
