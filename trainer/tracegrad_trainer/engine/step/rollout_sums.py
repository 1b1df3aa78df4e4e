"""What an objective sums over whole rollouts, where their rows are in several micro-batches.

These sums enter the gradients as numbers (`losses.tokens.rollout_sum`), so they are added up
before the first backward of an optimizer step: over this rank's micro-batches, then over all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from tracegrad_trainer.batches import MicroBatch
from tracegrad_trainer.engine.model.forward import (
    ForwardOutput,
    ModelInputs,
    TargetContext,
    forward,
    loss_tokens_of,
)
from tracegrad_trainer.engine.step.rank_context import RankContext
from tracegrad_trainer.losses import ObjectiveSettings, compute_loss


@torch.no_grad()
def with_rollout_sums(
    engine: RankContext,
    objective: ObjectiveSettings,
    inputs: Sequence[ModelInputs],
    known: Sequence[TargetContext],
) -> list[TargetContext]:
    """What is known of each micro-batch and the sums over its rollouts; a collective.

    Nothing is computed where the objective sums over none, or where each rollout is in one
    micro-batch. `TargetContext.current_logprobs` saves the forward, but for
    parts of the user's own.
    """
    if not objective.sums_rollouts:
        return list(known)
    keys = [keys_of(one.batch) for one in inputs]
    counts = _counts(engine, keys)
    if max(counts.values(), default=1) == 1:
        return list(known)
    partial = [_partial(engine, objective, i, k) for i, k in zip(inputs, known, strict=True)]
    engine.reshard()
    order = torch.tensor(sorted(counts), device=engine.device)
    places = [torch.searchsorted(order, torch.from_numpy(k).to(engine.device)) for k in keys]
    total = torch.zeros((len(partial[0]), len(order)), dtype=torch.float64, device=engine.device)
    for place, sums in zip(places, partial, strict=True):
        for row, values in zip(total, sums, strict=True):
            row.index_add_(0, place, values)
    engine.all_reduce_sum(total)
    return [
        replace(one, rollout_sums=tuple(row[place] for row in total))
        for one, place in zip(known, places, strict=True)
    ]


def keys_of(batch: MicroBatch) -> Int64[NDArray[np.int64], " rollouts"]:
    """Of each of the micro-batch's rollouts its key, by its number there."""
    keys = np.zeros(batch.rollouts, np.int64)
    keys[batch.rollout] = batch.rollout_keys[batch.row]
    return keys


def _counts(engine: RankContext, keys: Sequence[NDArray[np.int64]]) -> Counter[int]:
    """In how many micro-batches each rollout is, over all ranks."""
    mine = Counter(key for some in keys for key in np.unique(some).tolist())
    return sum(engine.all_gather(mine), Counter())


def _partial(
    engine: RankContext, objective: ObjectiveSettings, one: ModelInputs, known: TargetContext
) -> tuple[Float64[Tensor, " rollouts"], ...]:
    if known.current_logprobs is None or objective.has_custom_parts:
        values = "value" in objective.needs
        now = forward(engine.model, one, engine.head, values=values)
    else:
        # No part of ours sums entropies or values: what they are does not matter here.
        now = ForwardOutput(
            policy_logprobs=known.current_logprobs,
            entropy=known.current_logprobs,
            value=known.old_value,
        )
    return compute_loss(objective, loss_tokens_of(one, now, known)).rollout_sums
