"""Surrogates: what is minimised at each token, before correction and aggregation.

A part takes the tokens, the log-ratio [n] and the settings, and returns the loss [n] and
which tokens its clip holds still, bool[n].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .registry import Registry
from .tokens import Tokens


class ClipSettings(Protocol):
    @property
    def clip_low(self) -> float: ...
    @property
    def clip_high(self) -> float: ...
    @property
    def dual_clip(self) -> float | None: ...


Surrogate = Callable[[Tokens, Tensor, ClipSettings], tuple[Tensor, Tensor]]

SURROGATES: Registry[Surrogate] = Registry("surrogate")


@SURROGATES.register("ppo")
def ppo(tokens: Tokens, log_ratios: Tensor, settings: ClipSettings) -> tuple[Tensor, Tensor]:
    """-min(r A, [r]_{1-low}^{1+high} A) (PPO, arXiv 1707.06347).

    `dual_clip` c bounds the loss of bad tokens by -c A (arXiv 1912.09729).
    """
    ratio, advantage = log_ratios.exp(), tokens.advantage
    free = -ratio * advantage
    bounded = -ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantage
    loss = torch.maximum(free, bounded)
    clipped = bounded > free
    if settings.dual_clip is not None:
        ceiling = -settings.dual_clip * advantage
        over = (advantage < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        clipped = clipped | over
    return loss, clipped
