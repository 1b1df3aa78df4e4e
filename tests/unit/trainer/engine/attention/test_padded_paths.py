"""Every path of a pack is in a block as it is, and each token is read back from where it stands."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracegrad_trainer.engine.attention.masked import ScoreTransform
from tracegrad_trainer.engine.attention.packed import PackedRowAttention
from tracegrad_trainer.engine.attention.padded_paths import PaddedPaths

# Of each token but a row's first: how many steps up its path the token goes that it follows.
CLIMBS = st.lists(st.integers(0, 4), max_size=24)


def parents_of(climbs: list[int]) -> list[int]:
    """Of each token, depth first, the one before it on its path; -1: none."""
    parents, path = [-1], [0]
    for climb in climbs:
        path = path[: max(1, len(path) - climb)]
        parents.append(path[-1])
        path.append(len(parents) - 1)
    return parents


def path_to(token: int, parents: list[int]) -> list[int]:
    found = [token]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found[::-1]


@given(st.lists(CLIMBS, min_size=1, max_size=4))
def test_what_looks_back_along_paths_finds_those_of_each_token(rows: list[list[int]]) -> None:
    ends: list[int] = []
    wanted: list[list[int]] = []
    for climbs in rows:
        start, parents = len(ends), parents_of(climbs)
        paths = [path_to(token, parents) for token in range(len(parents))]
        last = [max(j for j, path in enumerate(paths) if i in path) for i in range(len(parents))]
        ends += [start + 1 + one for one in last]
        wanted += [[start + token for token in path] for path in paths]
    found = PaddedPaths.of_trees(np.array(ends), [1 + len(climbs) for climbs in rows])
    # Each token's digest of all that is before it in its block, as a recurrence would have it.
    digests = []
    for block in found.blocks:
        digest, seen = torch.zeros(len(block), dtype=torch.int64), []
        for place in block.T:
            digest = (31 * digest + place + 1) % 1_000_003
            seen.append(digest)
        digests.append(torch.stack(seen, 1))
    for token, digest in enumerate(found.join(digests).tolist()):
        expected = 0
        for place in wanted[token]:
            expected = (31 * expected + place + 1) % 1_000_003
        assert digest == expected


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_rows_of_about_the_same_length_share_a_block(lengths: list[int]) -> None:
    found = PaddedPaths.of_rows(lengths)
    assert torch.equal(found.join(found.blocks), torch.arange(sum(lengths)))
    assert sum(block.numel() for block in found.blocks) <= sum(lengths) / 0.6
    assert sum(len(block) for block in found.blocks) == len(lengths)


def test_what_is_not_finite_stays_in_its_row() -> None:
    """Weights of masked keys are 0, and 0 x NaN is NaN: no row is padded with another's tokens."""
    lengths = [5, 8, 7]
    for poisoned, length in enumerate(lengths):
        start = sum(lengths[:poisoned])
        query, key, value = (torch.randn(1, 2, sum(lengths), 4) for _ in range(3))
        value[:, :, start : start + length] = torch.nan
        out = PackedRowAttention(lengths).attend(query, key, value, ScoreTransform())
        finite = [bool(part.isfinite().all()) for part in out.split(lengths, 1)]
        assert finite == [row != poisoned for row in range(3)]
