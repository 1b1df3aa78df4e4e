"""Attention in blocks of queries and FlexAttention's block masks, against attention that is written
out; and that nothing is as large as the square of a row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tracegrad_trainer.engine.attention import blocked
from tracegrad_trainer.engine.attention.blocked import block_size, blocked_attention
from tracegrad_trainer.engine.attention.flex import FlexRowAttention
from tracegrad_trainer.engine.attention.masked import ScoreTransform, masked_attention
from tracegrad_trainer.engine.attention.packed import PackedRowAttention
from tracegrad_trainer.engine.attention.tree import TreeRowAttention
from tracegrad_trainer.engine.attention.visibility import FLEX_BLOCK, TokenVisibility

HEADS, KV_HEADS, WIDTH = 4, 2, 16
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
FORMS = [
    ScoreTransform(),
    ScoreTransform(window=9),
    ScoreTransform(softcap=2.0, scale=0.7),
    ScoreTransform(sinks=SINKS, window=40),
    ScoreTransform(sinks=SINKS, softcap=5.0),
]


def pack(rng: np.random.Generator, rows: int, longest: int) -> tuple[TokenVisibility, list[int]]:
    """Rows, every other one a tree: each token continues one of the last few open branches."""
    ends: list[int] = []
    depth: list[int] = []
    lengths = [int(n) for n in rng.integers(1, longest + 1, rows)]
    for number, length in enumerate(lengths):
        start = len(ends)
        parents = _depth_first(rng, length) if number % 2 else [i - 1 for i in range(length)]
        own = [0] * length
        for token, parent in enumerate(parents):
            own[token] = own[parent] + 1 if parent >= 0 else 0
        last = list(range(1, length + 1))
        for token in reversed(range(length)):
            if parents[token] >= 0:
                last[parents[token]] = max(last[parents[token]], last[token])
        ends += [start + end for end in last]
        depth += own
    return TokenVisibility(np.array(ends), np.array(depth)), lengths


def _depth_first(rng: np.random.Generator, length: int) -> list[int]:
    parents, path = [-1], [0]
    for token in range(1, length):
        if rng.random() < 0.05:  # a fork: back to an ancestor
            path = path[: int(rng.integers(1, len(path) + 1))]
        parents.append(path[-1])
        path.append(token)
    return parents


def heads(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, count, tokens, WIDTH, generator=made).to(dtype).requires_grad_()
        for count in (HEADS, KV_HEADS, KV_HEADS)
    ]


def dense(visibility: TokenVisibility, window: int | None) -> Tensor:
    place = torch.arange(len(visibility))
    return visibility.sees(place[:, None], place[None], window)


def with_gradients(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out.detach(), *torch.autograd.grad((out.float() * weights).sum(), given)]


@pytest.mark.parametrize("scores", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_queries_are_attention_as_it_is_written_out(
    scores: ScoreTransform, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "_SCORES", 1)  # sixteen queries at a time
    visibility, _ = pack(np.random.default_rng(seed), 3, 120)
    given = heads(len(visibility), seed)
    if scores.sinks is not None:
        sinks = SINKS.clone().requires_grad_()
        scores = ScoreTransform(window=scores.window, softcap=scores.softcap, sinks=sinks)
        given.append(sinks)
    q, k, v = given[:3]
    found = with_gradients(blocked_attention(q, k, v, scores, visibility), given)
    mask = dense(visibility, scores.window)
    expected = with_gradients(masked_attention(q, k, v, scores, mask), given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_gradients_of_keys_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 what late blocks add to an early key would be rounded away."""
    monkeypatch.setattr(blocked, "_SCORES", 1)
    visibility = TokenVisibility.of_rows([700])
    given = heads(700, dtype=torch.bfloat16)
    found = with_gradients(blocked_attention(*given, ScoreTransform(), visibility), given)
    exact = [x.detach().float().requires_grad_() for x in given]
    mask = dense(visibility, None)
    expected = with_gradients(masked_attention(*exact, ScoreTransform(), mask), exact)
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other).abs().max() < 0.02 * other.abs().max()


def test_blocks_are_in_the_values_precision_as_one_block_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where queries and keys were normalized in float32."""
    visibility, scores = TokenVisibility.of_rows([70]), ScoreTransform(softcap=2.0)
    q, k, v = heads(70)
    value = v.detach().bfloat16().requires_grad_()
    whole = with_gradients(blocked_attention(q, k, value, scores, visibility), [q, k, value])
    monkeypatch.setattr(blocked, "_SCORES", 1)
    found = with_gradients(blocked_attention(q, k, value, scores, visibility), [q, k, value])
    assert [x.dtype for x in found] == [x.dtype for x in whole]
    assert found[0].dtype == torch.bfloat16


def test_gradients_of_gradients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "_SCORES", 1)
    given = heads(70)
    out = blocked_attention(*given, ScoreTransform(), TokenVisibility.of_rows([70]))
    [first] = torch.autograd.grad(out.square().sum(), given[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5),
    size=st.sampled_from([16, 50, 128]),
    window=st.none() | st.integers(1, 150),
)
def test_blocks_leave_out_nothing_that_is_seen(
    seed: int, rows: int, size: int, window: int | None
) -> None:
    visibility, lengths = pack(np.random.default_rng(seed), rows, 200)
    mask = dense(visibility, window).numpy()
    stops = []
    for block in visibility.query_blocks(size, window):
        seen = np.zeros_like(mask[block.start : block.stop])
        places = torch.arange(len(visibility))[block.keys]
        seen[:, places.numpy()] = visibility.mask(block, window).numpy()
        assert (seen == mask[block.start : block.stop]).all()
        stops.append(block.stop)
    assert stops[-1] == len(visibility)
    assert all(a < b <= a + size for a, b in pairwise([0, *stops]))
    for row, start in zip(visibility.rows(lengths), np.cumsum([0, *lengths[:-1]]), strict=True):
        own = slice(start, start + len(row))
        assert (dense(row, window).numpy() == mask[own, own]).all()
    _check_block_mask(visibility, window, mask)


def _check_block_mask(
    visibility: TokenVisibility, window: int | None, mask: NDArray[np.bool_]
) -> None:
    """Whole blocks are seen whole; whatever is seen is in one that is looked at."""
    made = visibility.block_mask(window)
    covered = np.zeros_like(mask)
    kinds = [
        (made.kv_num_blocks, made.kv_indices, False),
        (made.full_kv_num_blocks, made.full_kv_indices, True),
    ]
    for counts, which, whole in kinds:
        assert counts is not None
        assert which is not None
        for row, count in enumerate(counts[0, 0].tolist()):
            queries = slice(row * FLEX_BLOCK, (row + 1) * FLEX_BLOCK)
            for column in which[0, 0, row, :count].tolist():
                keys = slice(column * FLEX_BLOCK, (column + 1) * FLEX_BLOCK)
                assert not covered[queries, keys].any(), "no block is counted twice"
                covered[queries, keys] = True
                assert not whole or mask[queries, keys].all()
    assert not (mask & ~covered).any()


BLOCK = FLEX_BLOCK
ROWS, ROW = TokenVisibility.of_rows([BLOCK] * 4), TokenVisibility.of_rows([4 * BLOCK])
# What both of two branches continue, and each of these.
FORK = TokenVisibility(
    np.repeat([3 * BLOCK, 2 * BLOCK, 3 * BLOCK], BLOCK),
    np.concatenate([np.arange(2 * BLOCK), np.arange(BLOCK, 2 * BLOCK)]),
)


@pytest.mark.parametrize(
    ("visibility", "window", "blocks", "keys"),
    [
        (ROWS, None, 4, [BLOCK] * 4),
        (ROW, None, 4 + 3 + 2 + 1, [BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK]),
        (ROW, BLOCK, 4 + 3, [BLOCK, *[2 * BLOCK - 1] * 3]),
        # The last token of a block sees all of the block before it but the first.
        (ROW, 2 * BLOCK - 1, 4 + 3 + 2, [BLOCK, 2 * BLOCK, *[3 * BLOCK - 2] * 2]),
        (FORK, None, 3 + 2, [BLOCK, 2 * BLOCK, 2 * BLOCK]),
    ],
)
def test_blocks_hold_no_more_than_what_is_seen(
    visibility: TokenVisibility, window: int | None, blocks: int, keys: list[int]
) -> None:
    """More would change no number, and take the time of a whole square."""
    made = visibility.block_mask(window)
    assert made.full_kv_num_blocks is not None
    assert int(made.kv_num_blocks.sum() + made.full_kv_num_blocks.sum()) == blocks
    _check_block_mask(visibility, window, dense(visibility, window).numpy())
    places = torch.arange(len(visibility))
    found = [len(places[one.keys]) for one in visibility.query_blocks(BLOCK, window)]
    assert found == keys


@pytest.mark.parametrize("scores", FORMS)
def test_flex_attention_is_attention_as_it_is_written_out(scores: ScoreTransform) -> None:
    """Its forward: on a CPU it has no backward."""
    visibility, _ = pack(np.random.default_rng(5), 4, 200)
    q, k, v = (x.detach() for x in heads(len(visibility)))
    found = FlexRowAttention(visibility).attend(q, k, v, scores, compiled=False)
    expected = masked_attention(q, k, v, scores, dense(visibility, scores.window))
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


class Largest(TorchDispatchMode):
    """The most entries of any tensor that is made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        # An expanded view has no memory of its own.
        sizes = [
            x.untyped_storage().nbytes() // x.element_size()
            for x in tree_leaves(made)
            if isinstance(x, Tensor)
        ]
        self.entries = max([self.entries, *sizes])
        return made


def of_rows(lengths: list[int]) -> Iterator[tuple[str, Any, ScoreTransform]]:
    visibility = TokenVisibility.of_rows(lengths)
    tree = TreeRowAttention(visibility.ends.numpy(), visibility.depth.numpy(), lengths)
    for scores in FORMS:
        if scores.window is not None or not scores.plain:
            yield "packed", PackedRowAttention(lengths), scores
        yield "tree", tree, scores


@pytest.mark.parametrize("number", range(9))
def test_memory_grows_with_a_rows_length_and_not_with_its_square(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "_SCORES", 1)
    seen = []
    for length in (1024, 4096):
        _, attention, scores = list(of_rows([length]))[number]
        given = heads(length)
        with Largest() as largest:
            out = attention.attend(*given, scores)
            torch.autograd.grad(out.sum(), given)
        seen.append(largest.entries)
    assert seen[1] <= 4.1 * seen[0]
    assert seen[1] < 4096 * 4096 / 4


def test_making_a_block_mask_takes_no_square_either() -> None:
    visibility = TokenVisibility.of_rows([32768])
    with Largest() as largest:
        visibility.block_mask(4096)
    assert largest.entries <= (32768 // FLEX_BLOCK + 1) ** 2


@pytest.mark.parametrize("length", [100, 8192, 131072])
@pytest.mark.parametrize("scores", FORMS)
def test_working_memory_is_bounded_by_what_is_held_at_a_time(
    length: int, scores: ScoreTransform
) -> None:
    size = block_size(length, 32, scores)
    assert size >= blocked._FEWEST_QUERIES
    held = size * (min(length, 2 * (scores.window or length)) * (1 if scores.plain else 32))
    assert held <= max(blocked._SCORES, blocked._FEWEST_QUERIES * length * 32)
    assert blocked.working_bytes(length, 32, scores) <= 4 * blocked._COPIES * held
