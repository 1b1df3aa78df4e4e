"""What a surrogate is, and the registry of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from tracegrad_trainer.losses.config import ObjectiveSettings
from tracegrad_trainer.losses.registry import Registry
from tracegrad_trainer.losses.tokens import PerToken, TokenMask, Tokens

Surrogate = Callable[[Tokens, Tensor, ObjectiveSettings], tuple[Tensor, Tensor]]
Losses = tuple[PerToken, TokenMask]

SURROGATES: Registry[Surrogate] = Registry("surrogate")


def sampled_only(part: Surrogate) -> Surrogate:
    """A policy gradient, which is over what the policy sampled: nothing at an expert's tokens."""

    @functools.wraps(part)
    def masked(
        tokens: Tokens, log_ratios: Tensor, settings: ObjectiveSettings
    ) -> tuple[Tensor, Tensor]:
        loss, clipped = part(tokens, log_ratios, settings)
        return loss.masked_fill(tokens.demonstration, 0.0), clipped & tokens.sampled

    return masked
