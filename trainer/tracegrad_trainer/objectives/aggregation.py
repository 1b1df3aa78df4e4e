"""Aggregation: what each token counts for, and what the sum is divided by.

A part returns weights f32[n] and this micro-batch's share of the denominator (a scalar). The
share is summed over micro-batches and ranks and divided out once an optimizer step, after the
backward pass: so a loss is the same however its rows were packed and shared out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .registry import Registry
from .tokens import Tokens

Aggregation = Callable[[Tokens], tuple[Tensor, Tensor]]

AGGREGATIONS: Registry[Aggregation] = Registry("aggregation")


@AGGREGATIONS.register("token_mean")
def token_mean(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Every token counts the same."""
    return torch.ones_like(tokens.mu), tokens.mu.new_tensor(float(len(tokens)))


@AGGREGATIONS.register("turn_mean")
def turn_mean(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Every turn counts the same, and its tokens share that."""
    share = 1 / tokens.turn_tokens
    return share, share.sum()
