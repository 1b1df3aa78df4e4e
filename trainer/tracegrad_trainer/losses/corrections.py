"""Correction of the mismatch between the serving engine (mu) and the training engine (old).

A level turns values of tokens [n] into those of their turns or rollouts, each token with its own's
[n]: a mean, or in `..._product` a sum. A mean of log w makes a geometric mean: in 200 tokens it
hides one that is 6 nats off (w = 1.03), which a product shows (w = 403).

A correction is given the level bound to the micro-batch and turns w = old/mu into weights [n],
which carry no gradient, and returns for which tokens it changed anything, bool[n].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tracegrad_trainer.losses.config import ObjectiveSettings
from tracegrad_trainer.losses.registry import Registry
from tracegrad_trainer.losses.tokens import (
    LOG_RATIO_LIMIT,
    PerToken,
    TokenMask,
    Tokens,
    log_mismatch,
    rollout_mean,
    rollout_sum,
    segment_mean,
    segment_sum,
)

Level = Callable[[Tensor, Tokens, ObjectiveSettings], Tensor]
Shared = Callable[[Tensor], Tensor]
Correction = Callable[[Tokens, Shared, ObjectiveSettings], tuple[Tensor, Tensor]]
Weights = tuple[PerToken, TokenMask]

LEVELS: Registry[Level] = Registry("correction_level")
CORRECTIONS: Registry[Correction] = Registry("correction")


@LEVELS.register("token")
def token(values: PerToken, tokens: Tokens, settings: ObjectiveSettings) -> PerToken:
    """Each token by itself."""
    return values


@LEVELS.register("turn")
def turn(values: PerToken, tokens: Tokens, settings: ObjectiveSettings) -> PerToken:
    """The mean over the turn: of log w, its geometric mean."""
    return segment_mean(values, tokens.turn, tokens.turns, tokens.sampled)[tokens.turn]


@LEVELS.register("sequence")
def sequence(values: PerToken, tokens: Tokens, settings: ObjectiveSettings) -> PerToken:
    """The mean over the rollout's sampled tokens, in all its rows."""
    return rollout_mean(values, tokens)[tokens.rollout]


@LEVELS.register("turn_product")
def turn_product(values: PerToken, tokens: Tokens, settings: ObjectiveSettings) -> PerToken:
    """The sum over the turn: of log w, the ratio of its whole reply's probabilities."""
    counted = values.masked_fill(tokens.demonstration, 0.0)
    return segment_sum(counted, tokens.turn, tokens.turns)[tokens.turn]


@LEVELS.register("sequence_product")
def sequence_product(values: PerToken, tokens: Tokens, settings: ObjectiveSettings) -> PerToken:
    """The sum over the rollout's sampled tokens, in all its rows."""
    counted = values.masked_fill(tokens.demonstration, 0.0)
    return rollout_sum(counted, tokens)[tokens.rollout]


def log_weight(tokens: Tokens, shared: Shared) -> PerToken:
    """log w at the level, clamped so that its exp is a finite number: a sum may be any."""
    return shared(log_mismatch(tokens)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def share_of_unit(tokens: Tokens, level: str) -> PerToken:
    """Each sampled token's share of what has one weight at this level: a token, a turn or a
    rollout."""
    if level in ("turn", "turn_product"):
        return 1 / tokens.turn_tokens
    if level in ("sequence", "sequence_product"):
        return 1 / tokens.rollout_sampled.clamp(min=1)
    return torch.ones_like(tokens.rollout_logprobs)


@CORRECTIONS.register("tis")
def tis(tokens: Tokens, shared: Shared, settings: ObjectiveSettings) -> Weights:
    """Truncated importance sampling: min(w, cap)."""
    w = log_weight(tokens, shared).exp()
    return w.clamp(max=settings.correction_cap), w > settings.correction_cap


@CORRECTIONS.register("mis")
def mis(tokens: Tokens, shared: Shared, settings: ObjectiveSettings) -> Weights:
    """w where floor <= w <= cap, else 0; at token level this is IcePop."""
    w = log_weight(tokens, shared).exp()
    outside = _outside(w, settings)
    return w.masked_fill(outside, 0.0), outside


@CORRECTIONS.register("reject")
def reject(tokens: Tokens, shared: Shared, settings: ObjectiveSettings) -> Weights:
    """1 where floor <= the level's `reject_stat` <= cap, else 0: a mask and no weight.

    `ratio` is w itself (at turn level IPA's M_k); k1 = |mean log w|, k2 = mean of (log w)^2 / 2,
    k3 = mean of w - 1 - log w.
    """
    log_w = log_mismatch(tokens)
    match settings.reject_stat:
        case "ratio":
            found = log_weight(tokens, shared).exp()
        case "k1":
            found = shared(log_w).abs()
        case "k2":
            found = shared(log_w.square() / 2)
        case "k3":
            found = shared(torch.expm1(log_w) - log_w)
    outside = _outside(found, settings)
    return (~outside).to(log_w.dtype), outside


@CORRECTIONS.register("none")
def none(tokens: Tokens, shared: Shared, settings: ObjectiveSettings) -> Weights:
    """Every token as it is."""
    return torch.ones_like(tokens.rollout_logprobs), torch.zeros_like(tokens.demonstration)


def _outside(found: PerToken, settings: ObjectiveSettings) -> TokenMask:
    return (found < settings.correction_floor) | (found > settings.correction_cap)
