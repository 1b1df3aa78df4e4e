"""How far two engines' log-probabilities are apart: quantiles, exact and by bins, and bounds."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from support.trainer.loss_tokens import tokens
from tracegrad_trainer.losses.diagnostics import gap_histogram
from tracegrad_trainer.losses.logprob_gap import (
    BINS,
    BOUNDS,
    TOKENS_FOR_P50,
    TOKENS_FOR_P99,
    GapBounds,
    LogprobGap,
    Precision,
    binned_quantile,
    coarser,
    precision_of,
    served_precision,
)

BOUND = GapBounds(p50=0.1, p99=0.5, mean=0.2)


def test_quantiles_are_of_the_tokens_in_order() -> None:
    gap = LogprobGap.of([i / 100 for i in range(200, 0, -1)])
    assert (gap.tokens, gap.p50, gap.p99, gap.max) == (200, 1.0, 1.98, 2.0)
    assert gap.mean == pytest.approx(1.005)
    assert LogprobGap.of([0.3]) == LogprobGap(1, 0.3, 0.3, 0.3, 0.3)


@pytest.mark.parametrize(
    ("gaps", "within"),
    [
        ([0.09] * 200, True),
        ([0.11] * 200, False),  # the median
        ([0.01] * 198 + [3.0] * 2, True),  # a tail of one in a hundred is rounding
        ([0.01] * 196 + [0.6] * 4, False),  # a longer one is not
        ([0.01] * 195 + [0.49] * 5, True),
        ([0.01] * 190 + [0.49] * 5 + [math.inf] * 5, False),
        ([0.0] * 60 + [0.49] * 59, False),  # the mean
        ([0.01] * (TOKENS_FOR_P99 - 1) + [0.6], True),  # of few tokens one says nothing
        ([math.nan] * 200, False),
        ([math.nan], False),
        # Of very few tokens half of them say nothing either, unless they are far off.
        ([0.3], True),
        ([0.3] * (TOKENS_FOR_P50 - 1), True),
        ([0.3] * TOKENS_FOR_P50, False),
        ([0.6] * 3, False),
        ([0.01, 0.01, 3.0], False),
    ],
)
def test_what_is_within_bounds(gaps: list[float], within: bool) -> None:
    assert LogprobGap.of(gaps).within(BOUND) is within


def test_coarser_formats_allow_more() -> None:
    order: tuple[Precision, ...] = ("float32", "bfloat16", "fp8")
    for finer, coarse in pairwise(order):
        assert coarser(finer, coarse) == coarser(coarse, finer) == coarse
        a, b = BOUNDS[finer], BOUNDS[coarse]
        assert a.p50 < b.p50
        assert a.p99 < b.p99
        assert a.mean < b.mean


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.float32, "float32"),
        (torch.float64, "float32"),
        (torch.bfloat16, "bfloat16"),
        ("float16", "bfloat16"),
        ("fp8", "fp8"),
        (torch.float8_e4m3fn, "fp8"),
    ],
)
def test_a_format_has_a_precision(dtype: object, precision: Precision) -> None:
    assert precision_of(dtype) == precision


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "precision"),
    [
        ("float32", True, "float32"),
        ("float32", False, "bfloat16"),
        ("bfloat16", False, "bfloat16"),
        ("fp8", False, "fp8"),
    ],
)
def test_a_gpu_serves_float32_in_tf32(dtype: str, on_cpu: bool, precision: Precision) -> None:
    assert served_precision(dtype, on_cpu=on_cpu) == precision


def test_quantiles_of_bins_that_were_added_are_those_of_all_tokens() -> None:
    torch.manual_seed(0)
    gaps = torch.cat([torch.rand(300) * 1e-5, torch.rand(200) * 3])
    parts = []
    for some in gaps.split([120, 0, 380]):
        given = tokens([0.0] * len(some), mu=(-some).tolist(), version=[4] * len(some))
        parts.append(gap_histogram(given, 4))
    counts = torch.stack(parts).sum(0)
    assert counts.shape == (BINS,)
    assert counts.sum() == len(gaps)
    exact = LogprobGap.of(gaps.tolist())
    for share, value in ((0.5, exact.p50), (0.99, exact.p99)):
        found = binned_quantile(counts.tolist(), share)
        assert value * (1 - 1e-6) <= found <= value * 2 ** (1 / 8) * (1 + 1e-6)


def test_only_what_the_current_version_sampled_is_counted() -> None:
    given = tokens([0.0] * 4, mu=[-0.5, -0.25, 0.0, -1.0], version=[4, 4, 4, 3])
    counts = gap_histogram(given, 4)
    assert counts.sum() == 3
    assert binned_quantile(counts.tolist(), 0.1) == 0  # equal to the last bit
    assert binned_quantile(counts.tolist(), 0.5) == pytest.approx(0.25)
    assert binned_quantile(counts.tolist(), 1.0) == pytest.approx(0.5)
    assert binned_quantile(gap_histogram(given, 9).tolist(), 0.5) == 0


def test_what_is_not_finite_has_a_bin_too() -> None:
    """Rows with such a number leave the step only after it was counted."""
    given = tokens([0.0, math.nan, 0.0, -math.inf], mu=[-1e30, 0.0, math.inf, 0.0], version=[4] * 4)
    assert gap_histogram(given, 4).sum() == 4
