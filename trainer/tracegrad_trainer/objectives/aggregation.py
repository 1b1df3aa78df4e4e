"""Aggregation: what each token counts for, and what the sum is divided by.

A part returns shares [n] and this micro-batch's part of the denominator (a scalar). The latter is
summed over micro-batches and ranks and divided out once an optimizer step, after the backward
pass: so a loss is the same however its rows were packed and shared out. A token that a surrogate
or a correction masks stays in the denominator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from .pairs import pairs_of
from .registry import Registry
from .settings import ObjectiveSettings
from .tokens import Tokens, segment_sum

Aggregation = Callable[[Tokens, ObjectiveSettings], tuple[Tensor, Tensor]]
Shares = tuple[Float[Tensor, " n"], Float[Tensor, ""]]

AGGREGATIONS: Registry[Aggregation] = Registry("aggregation")


@AGGREGATIONS.register("token_mean")
def token_mean(tokens: Tokens, settings: ObjectiveSettings) -> Shares:
    """Every token counts the same."""
    return torch.ones_like(tokens.mu), tokens.mu.new_tensor(float(len(tokens)))


@AGGREGATIONS.register("turn_mean")
def turn_mean(tokens: Tokens, settings: ObjectiveSettings) -> Shares:
    """Every turn counts the same, and its tokens share that."""
    share = 1 / tokens.turn_tokens
    return share, share.sum()


@AGGREGATIONS.register("rollout_mean")
def rollout_mean(tokens: Tokens, settings: ObjectiveSettings) -> Shares:
    """Every rollout counts the same, into however many rows it fans out."""
    share = 1 / tokens.rollout_tokens
    return share, share.sum()


@AGGREGATIONS.register("sum_constant")
def sum_constant(tokens: Tokens, settings: ObjectiveSettings) -> Shares:
    """A rollout's tokens are added up and divided by `constant`, however many there are
    (Dr. GRPO, arXiv 2503.20783); then the mean over rollouts.
    """
    return torch.ones_like(tokens.mu), settings.constant * (1 / tokens.rollout_tokens).sum()


@AGGREGATIONS.register("pair_mean")
def pair_mean(tokens: Tokens, settings: ObjectiveSettings) -> Shares:
    """The mean over whole preference pairs of what the surrogate spread over their tokens."""
    pairs = pairs_of(tokens)
    return pairs.whole[pairs.of_token].to(tokens.mu.dtype), pairs.whole.sum().to(tokens.mu.dtype)


@AGGREGATIONS.register("row_mean")
def row_mean(tokens: Tokens, settings: ObjectiveSettings) -> Shares:
    """The mean over labelled rows of what the surrogate spread over their tokens."""
    share = (tokens.label[tokens.row] != 0).to(tokens.mu.dtype)
    return share, (segment_sum(share, tokens.row, tokens.rows) > 0).sum().to(share.dtype)
