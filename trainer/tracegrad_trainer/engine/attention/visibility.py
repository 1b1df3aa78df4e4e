"""Which tokens of a pack attend to which: what rows, windows and the branches of trees come to.

Token i attends to token j where j <= i < end[j]: `end` is where the row of j ends, or in a row that
is a tree the subtree of j. Within a window it must be near enough besides. Nothing here is as large
as [tokens, tokens].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

# Of FlexAttention's kernels: queries, and keys, of one block.
FLEX_BLOCK = 128


@dataclass(frozen=True, slots=True, eq=False)
class QueryBlock:
    """The tokens `start` to `stop`, and the places of all that any of them attends to, in order."""

    start: int
    stop: int
    keys: slice | Int64[Tensor, " keys"]

    def take_keys(self, x: Tensor) -> Tensor:
        """Of [rows, heads, tokens, width]."""
        if isinstance(self.keys, slice):
            return x[:, :, self.keys]
        return x.index_select(2, self.keys)


class TokenVisibility:
    """Of one row, of rows one behind the other, or of rows that are trees."""

    def __init__(
        self,
        ends: Int64[NDArray[np.int64], " tokens"],
        depth: Int64[NDArray[np.int64], " tokens"],
        device: torch.device | str = "cpu",
    ) -> None:
        """`ends`: of each token, the place behind the last one that attends to it; `depth`: how
        many tokens are before it on its path, which is what a window counts."""
        self._host_ends, self._host_depth = np.asarray(ends), np.asarray(depth)
        self.ends = torch.from_numpy(self._host_ends).to(device)
        self.depth = torch.from_numpy(self._host_depth).to(device)

    @classmethod
    def of_rows(
        cls, row_lengths: Sequence[int], device: torch.device | str = "cpu"
    ) -> TokenVisibility:
        """Of plain rows, one behind the other."""
        lengths = np.asarray(row_lengths, np.int64)
        ends = np.repeat(np.cumsum(lengths), lengths)
        return cls(ends, np.arange(len(ends)) - (ends - np.repeat(lengths, lengths)), device)

    def __len__(self) -> int:
        return len(self._host_ends)

    def rows(self, row_lengths: Sequence[int]) -> list[TokenVisibility]:
        """Of each row, by itself; no token may be seen from outside of its row."""
        found, start = [], 0
        for length in row_lengths:
            own = slice(start, start + length)
            ends, depth = self._host_ends[own] - start, self._host_depth[own]
            found.append(TokenVisibility(ends, depth, self.ends.device))
            start += length
        return found

    def sees(self, i: Tensor, j: Tensor, window: int | None) -> Tensor:
        """Whether token i attends to token j, for places that broadcast."""
        sees = (j <= i) & (i < self.ends[j])
        # Along a path of a tree it is depth that counts tokens, not places.
        return sees if window is None else sees & (self.depth[i] - self.depth[j] < window)

    def mask(self, block: QueryBlock, window: int | None) -> Bool[Tensor, "queries keys"]:
        """Whether each query of the block attends to each of its keys."""
        device = self.ends.device
        i = torch.arange(block.start, block.stop, device=device)
        j = block.keys
        if isinstance(j, slice):
            j = torch.arange(j.start, j.stop, device=device)
        return self.sees(i[:, None], j[None], window)

    def query_blocks(self, size: int, window: int | None) -> Iterator[QueryBlock]:
        """All tokens, `size` at a time, each with the keys that any of them attends to."""
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            seen = self._host_ends[:start] > start
            if window is not None:
                seen &= self._host_depth[:start] > self._host_depth[start:stop].min() - window
            before = np.flatnonzero(seen)
            first = start - len(before)
            if not len(before) or before[0] == first:  # all that lie between are seen too
                yield QueryBlock(start, stop, slice(first, stop))
                continue
            places = np.concatenate([before, np.arange(start, stop)])
            yield QueryBlock(start, stop, torch.from_numpy(places).to(self.ends.device))

    def block_mask(self, window: int | None) -> BlockMask:
        """For FlexAttention, from the bounds of each block: `create_block_mask` writes out
        [tokens, tokens], 11 GB at 32k tokens."""
        some, every = self._blocks_seen(window)
        device = self.ends.device

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            # A kernel asks for places in the last block that are behind the last token.
            last = self.ends.shape[0] - 1
            return self.sees(i.clamp(max=last), j.clamp(max=last), window)

        return BlockMask.from_kv_blocks(
            *_ordered(some & ~every, device),
            *_ordered(every, device),
            BLOCK_SIZE=FLEX_BLOCK,
            mask_mod=mask_mod,
            seq_lengths=(len(self), len(self)),
        )

    def _blocks_seen(self, window: int | None) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """[query blocks, key blocks]: whether some query may attend to some key, and whether each
        does to each. What is said too often of `some` costs time and changes nothing."""
        first = np.arange(0, len(self), FLEX_BLOCK)
        last = np.minimum(first + FLEX_BLOCK, len(self)) - 1
        furthest = np.maximum.reduceat(self._host_ends, first)
        nearest = np.minimum.reduceat(self._host_ends, first)
        before = first[None] < first[:, None]
        some = np.eye(len(first), dtype=np.bool_) | (before & (furthest[None] > first[:, None]))
        every = before & (nearest[None] > last[:, None])
        if window is not None:
            deepest = np.maximum.reduceat(self._host_depth, first)
            shallowest = np.minimum.reduceat(self._host_depth, first)
            some &= shallowest[:, None] - deepest[None] < window
            every &= deepest[:, None] - shallowest[None] < window
        return some, every


def _ordered(seen: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, and which, those first: int32[1, 1, ...]."""
    counts = seen.sum(1, dtype=np.int32)
    which = np.argsort(~seen, axis=1, kind="stable").astype(np.int32)
    return tuple(torch.from_numpy(x)[None, None].to(device) for x in (counts, which))  # type: ignore[return-value]
