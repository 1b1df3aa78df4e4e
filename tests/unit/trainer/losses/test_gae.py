"""Generalized advantages: by hand, against the plain definition, and their limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tracegrad_trainer.losses.gae import gae


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Value, reward and row of up to 24 targets; numbers of rows need not rise."""
    lengths = draw(st.lists(st.integers(1, 8), max_size=4))
    names = draw(st.permutations(range(len(lengths))))
    row = [name for name, length in zip(names, lengths, strict=True) for _ in range(length)]
    numbers = st.lists(st.integers(-16, 16), min_size=len(row), max_size=len(row))
    value, reward = (torch.tensor(draw(numbers), dtype=torch.float64) / 4 for _ in range(2))
    return value, reward, torch.tensor(row, dtype=torch.int64)


def plain(value: Tensor, reward: Tensor, row: Tensor, gamma: float, lam: float) -> list[float]:
    """The definition, summed for every token."""
    v, r, rows_ = value.tolist(), reward.tolist(), row.tolist()
    found = []
    for t in range(len(v)):
        later = [s for s in range(t, len(v)) if rows_[s] == rows_[t]]
        total = 0.0
        for k, s in enumerate(later):
            following = v[later[k + 1]] if k + 1 < len(later) else 0.0
            total += (gamma * lam) ** k * (r[s] + gamma * following - v[s])
        found.append(total)
    return found


def test_by_hand() -> None:
    # Row 0: delta = 0 + 1/2 x 4 - 2, 0 + 1/2 x 6 - 4, 8 - 6 = 0, -1, 2; gamma lam = 1/4.
    # A = 0 + 1/4 x (-1/2), -1 + 1/4 x 2, 2. Row 1: 3 - 1.
    advantage, returns = gae(
        torch.tensor([2.0, 4.0, 6.0, 1.0]),
        torch.tensor([0.0, 0.0, 8.0, 3.0]),
        torch.tensor([0, 0, 0, 1]),
        gamma=0.5,
        lam=0.5,
    )
    assert advantage.tolist() == [-0.125, -0.5, 2.0, 2.0]
    assert returns.tolist() == [1.875, 3.5, 8.0, 3.0]


@settings(max_examples=50, deadline=None)
@given(rows(), st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.sampled_from([0.25, 0.9, 1.0]))
def test_equals_the_definition(
    made: tuple[Tensor, Tensor, Tensor], lam: float, gamma: float
) -> None:
    value, reward, row = made
    advantage, returns = gae(value, reward, row, gamma=gamma, lam=lam)
    expected = plain(value, reward, row, gamma, lam)
    np.testing.assert_allclose(advantage.numpy(), expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose((returns - value).numpy(), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(rows(), st.sampled_from([0.5, 1.0]))
def test_lambda_1_is_the_return_less_the_value(
    made: tuple[Tensor, Tensor, Tensor], gamma: float
) -> None:
    value, reward, row = made
    _, returns = gae(value, reward, row, gamma=gamma, lam=1.0)
    r, rows_ = reward.tolist(), row.tolist()
    expected = [
        sum(
            gamma**k * r[s]
            for k, s in enumerate(s for s in range(t, len(r)) if rows_[s] == rows_[t])
        )
        for t in range(len(r))
    ]
    np.testing.assert_allclose(returns.numpy(), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(rows())
def test_lambda_0_looks_one_target_ahead(made: tuple[Tensor, Tensor, Tensor]) -> None:
    value, reward, row = made
    advantage, _ = gae(value, reward, row, gamma=1.0, lam=0.0)
    for t in range(len(row)):
        following = float(value[t + 1]) if t + 1 < len(row) and row[t + 1] == row[t] else 0.0
        assert float(advantage[t]) == pytest.approx(float(reward[t]) + following - float(value[t]))


def test_the_next_value_skips_what_was_observed() -> None:
    """Two turns of two tokens with three observed ones between: only targets are counted, so it
    is the same as without them, and nothing is discounted over them."""
    whole_value = torch.tensor([1.0, 2.0, 50.0, 60.0, 70.0, 3.0, 4.0])
    mask = torch.tensor([1, 1, 0, 0, 0, 1, 1], dtype=torch.bool)
    value, reward = whole_value[mask], torch.tensor([0.0, 0.0, 0.0, 8.0])
    row = torch.zeros(7, dtype=torch.int64)[mask]
    advantage, _ = gae(value, reward, row, gamma=0.5, lam=0.0)
    # The last token of the first turn looks at the first of the second: 1/2 x 3 - 2.
    assert advantage.tolist() == [0.0, -0.5, -1.0, 4.0]


def test_no_gradient_flows() -> None:
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    for result in gae(value, torch.ones(2), torch.zeros(2, dtype=torch.int64), gamma=1.0, lam=0.9):
        assert not result.requires_grad
        assert result.dtype == value.dtype


def test_nothing_gives_nothing() -> None:
    none = torch.zeros(0)
    advantage, returns = gae(none, none, none.long(), gamma=1.0, lam=0.9)
    assert advantage.shape == returns.shape == (0,)
