"""Exact attention, a block of queries at a time: its memory grows with a row's length, not with the
square of it.

Scores of a block are made, used and dropped; backward makes them again (as FlashAttention does,
arXiv 2205.14135, here for any device and any form of scores).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from tracegrad_trainer.engine.attention.masked import ScoreTransform, masked_attention
from tracegrad_trainer.engine.attention.visibility import QueryBlock, TokenVisibility

# Scores, or entries of a mask, that are held at a time: 64 MiB in float32, of which a soft cap and
# a softmax hold a handful of copies.
_SCORES = 1 << 24
# Fewer queries at a time than this cost more calls than they save memory.
_FEWEST_QUERIES = 16
_COPIES = 6


def blocked_attention(
    query: Float[Tensor, "rows heads length width"],
    key: Float[Tensor, "rows kv_heads length width"],
    value: Float[Tensor, "rows kv_heads length value_width"],
    scores: ScoreTransform,
    visibility: TokenVisibility,
) -> Float[Tensor, "rows heads length value_width"]:
    """As `masked_attention` with the mask of `visibility`, which is that of each of the rows."""
    heads = query.shape[0] * query.shape[1]
    size = block_size(len(visibility), heads, scores)
    blocks = list(visibility.query_blocks(size, scores.window))
    if len(blocks) == 1:
        mask = visibility.mask(blocks[0], scores.window)
        return masked_attention(query, key, value, scores, mask)
    out: Tensor = _Blocked.apply(  # type: ignore[no-untyped-call]
        query, key, value, scores.sinks, replace(scores, sinks=None), visibility, blocks
    )
    return out


def block_size(length: int, heads: int, scores: ScoreTransform) -> int:
    """Queries at a time, of rows of this length and of so many heads in all."""
    reach = length if scores.window is None else min(length, 2 * scores.window)
    # Fused kernels write out no scores, only the mask that all heads share.
    entries = reach * (1 if scores.plain else heads)
    size = max(_FEWEST_QUERIES, _SCORES // max(entries, 1))
    return size if scores.window is None else min(size, max(_FEWEST_QUERIES, scores.window))


def working_bytes(length: int, heads: int, scores: ScoreTransform) -> int:
    """What is held beside the rows themselves, about, at most; linear in the length."""
    reach = length if scores.window is None else min(length, 2 * scores.window)
    held = 1 if scores.plain else heads
    return 4 * _COPIES * min(block_size(length, heads, scores), length) * reach * held


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scores: ScoreTransform,
        visibility: TokenVisibility,
        blocks: Sequence[QueryBlock],
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.scores, ctx.visibility, ctx.blocks = scores, visibility, blocks
        out = value.new_empty(*query.shape[:-1], value.shape[-1])
        for block in blocks:
            out[:, :, block.start : block.stop] = masked_attention(
                query[:, :, block.start : block.stop],
                block.take_keys(key),
                block.take_keys(value),
                replace(scores, sinks=sinks),
                visibility.mask(block, scores.window),
            )
        return out

    @staticmethod
    @once_differentiable  # else gradients of gradients would be zero without a word
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        query, key, value, sinks = ctx.saved_tensors
        (of_out,) = gradients
        # Keys of many blocks add up: in bfloat16 the late ones would be rounded away.
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in (key, value)]
        of_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        of_query = torch.empty_like(query)
        for block in ctx.blocks:
            rows = slice(block.start, block.stop)
            own = [query[:, :, rows], block.take_keys(key), block.take_keys(value)]
            own += [] if sinks is None else [sinks]
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in own]
                scores = replace(ctx.scores, sinks=None if sinks is None else leaves[3])
                mask = ctx.visibility.mask(block, scores.window)
                q, k, v = leaves[:3]
                out = masked_attention(q, k, v, scores, mask)
            found = torch.autograd.grad(out, leaves, of_out[:, :, rows])
            of_query[:, :, rows] = found[0]
            for total, part in zip(sums, found[1:3], strict=True):
                _add_keys(total, block, part)
            if of_sinks is not None:
                of_sinks += found[3]
        return (
            of_query,
            sums[0].to(key.dtype),
            sums[1].to(value.dtype),
            None if of_sinks is None else of_sinks.to(sinks.dtype),
            None,
            None,
            None,
        )


def _add_keys(total: Tensor, block: QueryBlock, part: Tensor) -> None:
    if isinstance(block.keys, slice):
        total[:, :, block.keys] += part
    else:
        total.index_add_(2, block.keys, part.float())
