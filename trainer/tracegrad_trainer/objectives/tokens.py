"""What an objective sees of a micro-batch, and the arithmetic that its parts share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp of anything beyond is no use in fp32 and turns one odd token into inf.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tokens:
    """The n trained tokens of a micro-batch. Three log-probability sets, kept apart.

    Only `logp` (the policy being trained) carries a gradient; `old` is the training engine's at
    the start of the batch, `mu` what the serving engine recorded. All at the temperature that
    the token was sampled with.
    """

    logp: Tensor  # f32[n]
    old: Tensor  # f32[n]
    mu: Tensor  # f32[n]
    advantage: Tensor  # f32[n]
    version: Tensor  # i64[n]
    turn: Tensor  # i64[n], 0..turns-1
    turns: int

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
