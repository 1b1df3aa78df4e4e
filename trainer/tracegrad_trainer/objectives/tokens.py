"""What an objective sees of a micro-batch, and the arithmetic that its parts share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# exp of anything beyond is no use in fp32 and turns one odd token into inf.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tokens:
    """The n trained tokens of a micro-batch. Three log-probability sets, kept apart.

    Only `logp` (the policy being trained) and `value` carry a gradient; `old` is the training
    engine's at the start of the batch, `mu` what the serving engine recorded. All at the
    temperature that the token was sampled with. A row is never split, a pair of rows neither; a
    rollout may be.
    """

    logp: Float[Tensor, " n"]
    old: Float[Tensor, " n"]
    mu: Float[Tensor, " n"]  # of an expert's tokens: nothing anybody recorded
    advantage: Float[Tensor, " n"]
    score: Float[Tensor, " n"]  # the rollout's reward as it was given
    version: Int[Tensor, " n"]
    expert: Bool[Tensor, " n"]
    turn: Int[Tensor, " n"]  # 0..turns-1, as row, rollout and group
    row: Int[Tensor, " n"]
    rollout: Int[Tensor, " n"]
    group: Int[Tensor, " n"]
    turns: int
    rows: int
    rollouts: int
    groups: int
    turn_tokens: Float[Tensor, " n"]  # targets of the token's turn, and of its rollout, in the
    rollout_tokens: Float[Tensor, " n"]  # whole optimizer step
    pair: Int[Tensor, " rows"]
    label: Int[Tensor, " rows"]
    # What the objective asked for (`ObjectiveSettings.needs`), else None.
    reference: Float[Tensor, " n"] | None = None
    value: Float[Tensor, " n"] | None = None  # with gradient
    old_value: Float[Tensor, " n"] | None = None
    returns: Float[Tensor, " n"] | None = None
    kto_z: Float[Tensor, ""] | None = None

    def __len__(self) -> int:
        return int(self.logp.shape[0])


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def turn_mean(values: Tensor, turn: Tensor, turns: int) -> Tensor:
    """Mean over each turn's tokens, [turns]."""
    total = values.new_zeros(turns).index_add(0, turn, values)
    return total / turn_sizes(turn, turns)


def turn_sizes(turn: Tensor, turns: int) -> Tensor:
    return torch.bincount(turn, minlength=turns).clamp(min=1).to(torch.float32)
