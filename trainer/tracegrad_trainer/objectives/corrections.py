"""Correction of the mismatch between the serving engine (mu) and the training engine (old).

A level turns log old/mu into log w [n]; a correction turns log w into weights [n], which carry
no gradient, and says which tokens it touched, bool[n].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .registry import Registry
from .tokens import Tokens, log_ratio, turn_mean

Level = Callable[[Tokens], Tensor]
Correction = Callable[[Tensor, float], tuple[Tensor, Tensor]]

LEVELS: Registry[Level] = Registry("correction level")
CORRECTIONS: Registry[Correction] = Registry("correction")


@LEVELS.register("token")
def token(tokens: Tokens) -> Tensor:
    return log_ratio(tokens.old, tokens.mu)


@LEVELS.register("turn")
def turn(tokens: Tokens) -> Tensor:
    """The turn's geometric mean, shared by its tokens."""
    return turn_mean(log_ratio(tokens.old, tokens.mu), tokens.turn, tokens.turns)[tokens.turn]


@CORRECTIONS.register("tis")
def tis(log_w: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling: min(w, cap)."""
    w = log_w.exp()
    return w.clamp(max=cap), w > cap


@CORRECTIONS.register("none")
def none(log_w: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    return torch.ones_like(log_w), torch.zeros_like(log_w, dtype=torch.bool)
