"""Forward and backward over a rank's micro-batches: gradients of a sum, nothing divided yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tracegrad_trainer.batches import MicroBatch
from tracegrad_trainer.engine.model.forward import Before, Inputs, forward, tokens_of
from tracegrad_trainer.engine.model.parallelize import between_micro_batches
from tracegrad_trainer.engine.step.rank_context import Engine
from tracegrad_trainer.engine.step.reduce import Totals
from tracegrad_trainer.losses import ObjectiveSettings, Tokens, evaluate, maxima, sums


@dataclass(slots=True)
class Accumulated:
    """`wrong`: of each micro-batch the targets, bool[n], of which some number is not finite."""

    totals: Totals = field(default_factory=Totals)
    wrong: list[Tensor] = field(default_factory=list)


def rows_with(
    engine: Engine,
    objective: ObjectiveSettings,
    wrong: Sequence[Tensor],
    micro_batches: Sequence[MicroBatch],
) -> list[int]:
    """Keys of the rows, on any rank, that hold such targets, and of those paired with them. Where
    something is summed over rollouts, one of these leaves whole. A collective."""
    rows = [batch.row[here.cpu().numpy()] for here, batch in zip(wrong, micro_batches, strict=True)]
    rollouts: list[int] = []
    if objective.sums_rollouts:
        mine = [batch.rollout_keys[row] for row, batch in zip(rows, micro_batches, strict=True)]
        rollouts = engine.gather(np.concatenate([*mine, np.zeros(0, np.int64)]).tolist())
    found: set[int] = set()
    for row, batch in zip(rows, micro_batches, strict=True):
        keys = batch.row_keys
        gone = np.union1d(keys[row], keys[np.isin(batch.rollout_keys, rollouts)])
        left, _ = batch.without(gone.tolist())
        found |= set(keys.tolist()) - set(left.row_keys.tolist())
    return engine.gather(sorted(found))


def accumulate(
    engine: Engine,
    objective: ObjectiveSettings,
    inputs: Sequence[Inputs],
    before: Sequence[Before],
    *,
    version: int,
    reshard: bool,
    entropy_coef: float | None = None,
) -> Accumulated:
    """Adds to the parameters' gradients; `version` is the current policy version, `entropy_coef` as
    in `evaluate`."""
    done = Accumulated()
    values = "value" in objective.needs
    for i, one in enumerate(inputs):
        between_micro_batches(engine.model, last=i == len(inputs) - 1, reshard=reshard)
        now = forward(
            engine.model,
            one,
            engine.head,
            values=values,
            entropy_gradient=objective.has_entropy,
        )
        tokens = tokens_of(one, now, before[i])
        loss = evaluate(objective, tokens, entropy_coef=entropy_coef)
        assert objective.sums_rollouts or not loss.rollout_sums
        # Where nothing is learnt there is a backward too, for the collectives.
        total = loss.total if loss.total.requires_grad else loss.total + now.logp.sum() * 0
        torch.autograd.backward(total)
        with torch.no_grad():
            wrong = not_finite(_given(tokens))
            more = sums(tokens, loss, now.entropy.detach(), version) | {"wrong": wrong.sum()}
            done.totals.add(more, maxima(tokens, loss, version))
            done.wrong.append(wrong)
    return done


def _given(tokens: Tokens) -> list[Tensor | None]:
    """What a forward or an engine said of the targets."""
    known = [tokens.logp, tokens.old, tokens.mu]
    return [*known, tokens.reference, tokens.value, tokens.old_value]


def not_finite(given: Sequence[Tensor | None]) -> Tensor:
    """Where any of these, [n] each, is no finite number; the first is there. bool[n]."""
    assert given[0] is not None
    finite = torch.ones_like(given[0], dtype=torch.bool)
    for values in given:
        if values is not None:
            finite &= torch.isfinite(values)
    return ~finite
