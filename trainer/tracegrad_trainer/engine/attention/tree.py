"""Attention over trees: branches see what they continue, and not each other.

A rollout with forks is one row, its tokens depth first; token j is seen by the tokens
j <= i < subtree_end[j]. So a prefix that several branches share is computed once, where rows of
one path each would compute it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray

from tracegrad_trainer.engine.attention.blocked import blocked_attention
from tracegrad_trainer.engine.attention.flex import FlexRowAttention, takes_heads
from tracegrad_trainer.engine.attention.masked import (
    Attended,
    Keys,
    Queries,
    ScoreTransform,
    Values,
)
from tracegrad_trainer.engine.attention.visibility import TokenVisibility


class TreeRowAttention:
    """Rows that are trees: FlexAttention on CUDA, row by row in blocks of queries elsewhere."""

    def __init__(
        self,
        subtree_end: Int64[NDArray[np.int64], " tokens"],
        depth: Int64[NDArray[np.int64], " tokens"],
        row_lengths: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        self.visibility = TokenVisibility(subtree_end, depth, device)
        self.row_lengths = list(row_lengths)
        self.flex = FlexRowAttention(self.visibility)

    def attend(self, query: Queries, key: Keys, value: Values, scores: ScoreTransform) -> Attended:
        if takes_heads(query, value):
            return self.flex.attend(query, key, value, scores)
        return self.exact(query, key, value, scores)

    def exact(self, query: Queries, key: Keys, value: Values, scores: ScoreTransform) -> Attended:
        parts = zip(
            *(torch.split(x, self.row_lengths, 2) for x in (query, key, value)),
            self._rows,
            strict=True,
        )
        out = [blocked_attention(q, k, v, scores, row) for q, k, v, row in parts]
        return torch.cat(out, 2).transpose(1, 2)

    @cached_property
    def _rows(self) -> list[TokenVisibility]:
        return self.visibility.rows(self.row_lengths)
