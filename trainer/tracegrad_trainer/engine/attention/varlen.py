"""Packed rows by torch's variable-length kernel: CUDA devices, half precision.

The rows stay where they are in the pack; the kernel gets where each begins.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tracegrad_trainer.engine.attention.flex import FlexRowAttention, takes_heads
from tracegrad_trainer.engine.attention.masked import (
    Attended,
    Keys,
    Queries,
    ScoreTransform,
    Values,
)
from tracegrad_trainer.engine.attention.packed import PackedRowAttention
from tracegrad_trainer.engine.attention.visibility import TokenVisibility

# The flash kernels' widest head; they also want a multiple of 8.
_WIDEST_HEAD = 256
# torch 2.11 hands fewer heads of keys than of queries to the kernel by itself.
_ASKS_FOR_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


class VarlenRowAttention:
    """Where each row of a pack begins."""

    def __init__(self, row_lengths: Sequence[int], device: torch.device | str) -> None:
        self.row_lengths = list(row_lengths)
        self.longest = max(row_lengths)
        lengths = torch.tensor([0, *row_lengths])
        self.starts = lengths.cumsum(0, dtype=torch.int32).to(device)  # [rows + 1]

    def attend(self, query: Queries, key: Keys, value: Values, scores: ScoreTransform) -> Attended:
        """Layers that the kernel has not (soft caps, sinks) are FlexAttention's; odd heads go in
        padded blocks."""
        width = query.shape[-1]
        fits = width == value.shape[-1] and width <= _WIDEST_HEAD and width % 8 == 0
        if not scores.plain and takes_heads(query, value):
            return self._flex.attend(query, key, value, scores)
        if not scores.plain or not fits:
            return self._blocks.attend(query, key, value, scores)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        # transformers counts the token itself into the window, the kernel those before it.
        before = -1 if scores.window is None else scores.window - 1
        if before >= self.longest:
            before = -1  # with which the kernel knows that it is plainly causal
        places = (self.starts, self.starts, self.longest, self.longest)  # of queries, of keys
        gqa: dict[str, Any] = {}
        if k.shape[1] != q.shape[1] and _ASKS_FOR_GROUPS:
            gqa["enable_gqa"] = True
        out = varlen_attn(q, k, v, *places, scale=scores.scale, window_size=(before, 0), **gqa)
        assert isinstance(out, Tensor)
        return out[None]

    @cached_property
    def _flex(self) -> FlexRowAttention:
        return FlexRowAttention(TokenVisibility.of_rows(self.row_lengths, self.starts.device))

    @cached_property
    def _blocks(self) -> PackedRowAttention:
        return PackedRowAttention(self.row_lengths, self.starts.device)
