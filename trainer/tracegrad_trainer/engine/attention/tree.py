"""Attention over trees: branches see what they continue, and not each other.

A rollout with forks is one row, its tokens depth first; token j is seen by the tokens
j <= i < subtree_end[j]. So a prefix that several branches share is computed once, where rows of
one path each would compute it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tracegrad_trainer.engine.attention.masked import (
    Attended,
    Keys,
    Queries,
    ScoreTransform,
    Values,
    masked_attention,
)

# Of compiled flex attention: heads narrower than this it refuses; and graphs of it.
_NARROWEST_HEAD = 16
_GRAPHS = 64


class TreeRowAttention:
    """Rows that are trees: FlexAttention on CUDA, masked SDPA row by row elsewhere.

    FlexAttention skips blocks that nobody sees; on a CPU it has no backward.
    """

    def __init__(
        self,
        subtree_end: Int64[NDArray[np.int64], " tokens"],
        depth: Int64[NDArray[np.int64], " tokens"],
        row_lengths: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        self.ends = torch.from_numpy(subtree_end).to(device)  # [T]
        self.depth = torch.from_numpy(depth).to(device)  # [T]
        self.row_lengths = list(row_lengths)
        self._masks: dict[int | None, list[Tensor]] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    def attend(self, query: Queries, key: Keys, value: Values, scores: ScoreTransform) -> Attended:
        narrow = min(query.shape[-1], value.shape[-1]) < _NARROWEST_HEAD
        if query.is_cuda and scores.sinks is None and not narrow:
            return self.flex(query, key, value, scores, compiled=True)
        return self.exact(query, key, value, scores)

    def exact(self, query: Queries, key: Keys, value: Values, scores: ScoreTransform) -> Attended:
        q, k, v = (torch.split(x, self.row_lengths, 2) for x in (query, key, value))
        masks = self._row_masks(scores.window)
        parts = [
            masked_attention(*qkv, scores, mask)
            for qkv, mask in zip(zip(q, k, v, strict=True), masks, strict=True)
        ]
        return torch.cat(parts, 2).transpose(1, 2)

    def flex(
        self, query: Queries, key: Keys, value: Values, scores: ScoreTransform, *, compiled: bool
    ) -> Attended:
        cap = scores.softcap

        def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            assert cap is not None
            return cap * torch.tanh(score / cap)

        attention: Any = _compiled_flex() if compiled else flex_attention
        out: Tensor = attention(
            query,
            key,
            value,
            score_mod=None if cap is None else capped,
            block_mask=self._block_mask(scores.window),
            scale=scores.scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return out.transpose(1, 2)

    def _row_masks(self, window: int | None) -> list[Tensor]:
        """bool[L, L] of each row; layers of the same window share them."""
        if window not in self._masks:
            masks, start = [], 0
            for length in self.row_lengths:
                place = torch.arange(start, start + length, device=self.ends.device)
                masks.append(self._sees(place[:, None], place[None], window))
                start += length
            self._masks[window] = masks
        return self._masks[window]

    def _block_mask(self, window: int | None) -> BlockMask:
        if window not in self._block_masks:
            tokens = len(self.ends)
            self._block_masks[window] = create_block_mask(
                lambda b, h, i, j: self._sees(i, j, window),
                B=None,
                H=None,
                Q_LEN=tokens,
                KV_LEN=tokens,
                device=str(self.ends.device),
            )
        return self._block_masks[window]

    def _sees(self, i: Tensor, j: Tensor, window: int | None) -> Tensor:
        """Whether token i attends to token j: an ancestor of it, and near enough."""
        sees = (j <= i) & (i < self.ends[j])
        # Along a path of a tree it is depth that counts tokens, not places.
        return sees if window is None else sees & (self.depth[i] - self.depth[j] < window)


@cache
def _compiled_flex() -> Any:
    # Uncompiled it writes out all scores. So it would beyond dynamo's limit, and there is a graph
    # for each window, cap, head's width, with and without gradient, for short and long packs.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _GRAPHS)
    return torch.compile(flex_attention, dynamic=True)
