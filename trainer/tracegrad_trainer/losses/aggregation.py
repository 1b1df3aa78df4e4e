"""Aggregation: what each token counts for, and what the sum is divided by.

A part returns shares [n] and this micro-batch's part of the denominator (a scalar). The latter is
summed over micro-batches and ranks and divided out once an optimizer step, after the backward
pass: so a loss is the same however its rows were packed and shared out. A token that a surrogate
or a correction masks stays in the denominator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tracegrad_trainer.losses.config import ObjectiveSettings
from tracegrad_trainer.losses.registry import Registry
from tracegrad_trainer.losses.tokens import PerToken, Scalar, Tokens, pairs_of_tokens

Aggregation = Callable[[Tokens, ObjectiveSettings], tuple[Tensor, Tensor]]
Shares = tuple[PerToken, Scalar]

AGGREGATIONS: Registry[Aggregation] = Registry("aggregation")


@AGGREGATIONS.register("token_mean")
def token_mean(tokens: Tokens, settings: ObjectiveSettings) -> Shares:
    """Every token counts the same."""
    share, _ = _counted(tokens, settings)
    return share, share.sum()


@AGGREGATIONS.register("turn_mean")
def turn_mean(tokens: Tokens, settings: ObjectiveSettings) -> Shares:
    """Every turn counts the same, and its tokens share that."""
    counted, _ = _counted(tokens, settings)
    share = counted / tokens.turn_tokens
    return share, share.sum()


@AGGREGATIONS.register("rollout_mean")
def rollout_mean(tokens: Tokens, settings: ObjectiveSettings) -> Shares:
    """Every rollout counts the same, into however many rows it fans out."""
    counted, of_rollout = _counted(tokens, settings)
    share = counted / of_rollout
    return share, share.sum()


@AGGREGATIONS.register("group_mean")
def group_mean(tokens: Tokens, settings: ObjectiveSettings) -> Shares:
    """Every group counts the same, and its tokens share that: the mean over all tokens of a
    prompt's rollouts, then over prompts ("prompt average" of ScaleRL, arXiv 2510.13786).
    """
    counted, _ = _counted(tokens, settings)
    of_group = tokens.group_tokens if settings.learns_from_demonstrations else tokens.group_sampled
    share = counted / of_group.clamp(min=1)
    return share, share.sum()


@AGGREGATIONS.register("sum_constant")
def sum_constant(tokens: Tokens, settings: ObjectiveSettings) -> Shares:
    """A rollout's tokens are added up and divided by `constant`, however many there are
    (Dr. GRPO, arXiv 2503.20783); then the mean over rollouts.
    """
    counted, of_rollout = _counted(tokens, settings)
    return counted, settings.constant * (counted / of_rollout).sum()


def _counted(tokens: Tokens, settings: ObjectiveSettings) -> tuple[PerToken, PerToken]:
    """1 for each token that counts, else 0, and how many of its rollout do: an expert's only
    where the surrogate may learn from them."""
    if settings.learns_from_demonstrations:
        return torch.ones_like(tokens.rollout_logprobs), tokens.rollout_tokens
    return tokens.sampled.to(tokens.rollout_logprobs.dtype), tokens.rollout_sampled.clamp(min=1)


@AGGREGATIONS.register("pair_mean")
def pair_mean(tokens: Tokens, settings: ObjectiveSettings) -> Shares:
    """The mean over whole preference pairs of what the surrogate spread over their tokens."""
    pairs = pairs_of_tokens(tokens)
    return pairs.whole[pairs.of_token].to(tokens.rollout_logprobs.dtype), pairs.whole.sum().to(
        tokens.rollout_logprobs.dtype
    )


@AGGREGATIONS.register("label_mean")
def label_mean(tokens: Tokens, settings: ObjectiveSettings) -> Shares:
    """The mean over labelled rollouts of what the surrogate spread over their tokens."""
    share = (tokens.label[tokens.row] != 0).to(tokens.rollout_logprobs.dtype)
    return share, (share / tokens.rollout_tokens).sum()
