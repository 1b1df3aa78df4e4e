"""Activation checkpointing: what a block's forward keeps for backward, and what is computed again.

Whole: a block's input alone is kept (arXiv 1604.06174). Selective: by operation, as torchtitan has
it: what is dear to compute again is kept too, attention and every other matrix product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Forward = Callable[..., Any]

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._flash_attention_forward.default,
}


def recomputed(forward: Forward, *, selective: bool) -> Forward:
    """The forward of a block, recomputed in backward; nothing in it is random."""
    # Not transformers' own, which works in training mode only.
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        how["context_fn"] = _contexts
    return partial(_checkpointed, forward, how)


def _checkpointed(forward: Forward, how: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(forward, **kwargs), *args, **how)


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Of one forward, and of its repetition: both must count alike."""
    products: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 0
        else:
            keep = operation in _ATTENTION or "varlen_attn" in str(operation)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    made: Any = create_selective_checkpoint_contexts
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = made(policy)
    return contexts
