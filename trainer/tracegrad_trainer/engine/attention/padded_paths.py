"""The paths of a pack side by side: rows, or in rows that are trees the ways from root to leaf."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from numpy.typing import NDArray
from torch import Tensor

# Paths shorter than this share of the longest in their block start a block of their own.
_ALIKE = 0.6

Places = Int64[NDArray[np.int64], " path"]


class PaddedPaths:
    """Blocks [paths, longest] of places in the pack, padded on the right.

    Paths of about the same length share a block. Padding lies behind every real token, so whatever
    looks back only, attention or a recurrence, needs no mask. Work grows with the sum of the paths'
    lengths: a prefix that branches share is in a block once for each of them, and is read from one.
    """

    def __init__(self, paths: Sequence[Places], device: torch.device | str = "cpu") -> None:
        """`paths`: the places of each, in order; together every place of the pack."""
        tokens = 1 + max(int(path[-1]) for path in paths)
        lengths = [len(path) for path in paths]
        order = sorted(range(len(paths)), key=lambda i: -lengths[i])
        self.blocks: list[Tensor] = []  # [paths, longest] places in the pack
        back = np.full(tokens, -1, np.int64)
        offset = 0
        for block in _alike(order, lengths):
            longest = lengths[block[0]]
            place = np.empty((len(block), longest), np.int64)
            for i, path in enumerate(block):
                place[i, : lengths[path]] = paths[path]
                # Masked is not untouched: 0 x NaN of another path would be NaN in this one.
                place[i, lengths[path] :] = paths[path][-1]
                back[paths[path]] = offset + i * longest + np.arange(lengths[path])
            self.blocks.append(torch.from_numpy(place).to(device))
            offset += place.size
        assert (back >= 0).all(), "some token is on no path"
        self.back = torch.from_numpy(back).to(device)  # [T] places in the flattened blocks

    @classmethod
    def of_rows(cls, row_lengths: Sequence[int], device: torch.device | str = "cpu") -> PaddedPaths:
        return cls(_rows(row_lengths), device)

    @classmethod
    def of_trees(
        cls,
        subtree_end: Int64[NDArray[np.int64], " tokens"],
        row_lengths: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> PaddedPaths:
        """Of rows that are trees; see `attention.tree`."""
        paths = []
        for row in _rows(row_lengths):
            # A token after which another branch begins, or nothing, is a leaf.
            leaves = row[subtree_end[row] == row + 1]
            paths += [_path_to(leaf, int(row[0]), subtree_end) for leaf in leaves.tolist()]
        return cls(paths, device)

    def join(self, blocks: Sequence[Shaped[Tensor, "_ _ ..."]]) -> Shaped[Tensor, "tokens ..."]:
        """What was computed of each block, in the order of the pack."""
        flat = [block.flatten(0, 1) for block in blocks]
        return (flat[0] if len(flat) == 1 else torch.cat(flat)).index_select(0, self.back)


def _rows(row_lengths: Sequence[int]) -> list[Places]:
    stops = np.cumsum(row_lengths)
    return [np.arange(e - n, e) for n, e in zip(row_lengths, stops, strict=True)]


def _path_to(leaf: int, start: int, subtree_end: Int64[NDArray[np.int64], " tokens"]) -> Places:
    return start + np.flatnonzero(subtree_end[start : leaf + 1] > leaf)


def _alike(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    blocks: list[list[int]] = []
    for path in order:
        if blocks and lengths[path] >= _ALIKE * lengths[blocks[-1][0]]:
            blocks[-1].append(path)
        else:
            blocks.append([path])
    return blocks
