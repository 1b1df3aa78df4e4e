"""Granularity of the ratio pi/old: log-ratios [n], clamped, with gradient."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .registry import Registry
from .tokens import Tokens, log_ratio, turn_mean

Ratio = Callable[[Tokens], Tensor]

RATIOS: Registry[Ratio] = Registry("ratio")


@RATIOS.register("token")
def token(tokens: Tokens) -> Tensor:
    """log pi/old of each token."""
    return log_ratio(tokens.logp, tokens.old)


@RATIOS.register("turn")
def turn(tokens: Tokens) -> Tensor:
    """Mean log pi/old over a turn: the turn's tokens share one (geometric-mean) ratio."""
    means = turn_mean(log_ratio(tokens.logp, tokens.old), tokens.turn, tokens.turns)
    return means[tokens.turn]
