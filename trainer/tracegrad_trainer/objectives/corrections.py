"""Correction of the mismatch between the serving engine (mu) and the training engine (old).

A level is a mean: it turns values of tokens [n] into those of their turns or rows, each token with
its own's [n]. A correction is given the level bound to the micro-batch and turns w = old/mu into
weights [n], which carry no gradient, and says which tokens it changed anything for, bool[n].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .registry import Registry
from .settings import ObjectiveSettings
from .tokens import Tokens, mismatch, segment_mean

Level = Callable[[Tensor, Tokens, ObjectiveSettings], Tensor]
Shared = Callable[[Tensor], Tensor]
Correction = Callable[[Tokens, Shared, ObjectiveSettings], tuple[Tensor, Tensor]]
Weights = tuple[Float[Tensor, " n"], Bool[Tensor, " n"]]

LEVELS: Registry[Level] = Registry("correction_level")
CORRECTIONS: Registry[Correction] = Registry("correction")


@LEVELS.register("token")
def token(
    values: Float[Tensor, " n"], tokens: Tokens, settings: ObjectiveSettings
) -> Float[Tensor, " n"]:
    """Each token by itself."""
    return values


@LEVELS.register("turn")
def turn(
    values: Float[Tensor, " n"], tokens: Tokens, settings: ObjectiveSettings
) -> Float[Tensor, " n"]:
    """The mean over the turn: of log w, its geometric mean."""
    return segment_mean(values, tokens.turn, tokens.turns, tokens.sampled)[tokens.turn]


@LEVELS.register("sequence")
def sequence(
    values: Float[Tensor, " n"], tokens: Tokens, settings: ObjectiveSettings
) -> Float[Tensor, " n"]:
    """The mean over the row's sampled tokens."""
    return segment_mean(values, tokens.row, tokens.rows, tokens.sampled)[tokens.row]


@CORRECTIONS.register("tis")
def tis(tokens: Tokens, shared: Shared, settings: ObjectiveSettings) -> Weights:
    """Truncated importance sampling: min(w, cap)."""
    w = shared(mismatch(tokens)).exp()
    return w.clamp(max=settings.correction_cap), w > settings.correction_cap


@CORRECTIONS.register("mis")
def mis(tokens: Tokens, shared: Shared, settings: ObjectiveSettings) -> Weights:
    """w where floor <= w <= cap, else 0; at token level this is IcePop."""
    w = shared(mismatch(tokens)).exp()
    outside = _outside(w, settings)
    return w.masked_fill(outside, 0.0), outside


@CORRECTIONS.register("reject")
def reject(tokens: Tokens, shared: Shared, settings: ObjectiveSettings) -> Weights:
    """1 where floor <= the level's `reject_stat` <= cap, else 0: a mask and no weight.

    `ratio` is w itself (at turn level IPA's M_k); k1 = |mean log w|, k2 = mean of (log w)^2 / 2,
    k3 = mean of w - 1 - log w.
    """
    log_w = mismatch(tokens)
    match settings.reject_stat:
        case "ratio":
            found = shared(log_w).exp()
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
    return torch.ones_like(tokens.mu), torch.zeros_like(tokens.expert)


def _outside(found: Float[Tensor, " n"], settings: ObjectiveSettings) -> Bool[Tensor, " n"]:
    return (found < settings.correction_floor) | (found > settings.correction_cap)
