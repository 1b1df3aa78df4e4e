"""The comparison of served and trained log-probabilities."""

from __future__ import annotations

import math

import pytest

from tracegrad_trainer.inference.logprob_probe import ProbeMismatchError, compare_logprobs


def test_the_gap_is_measured_a_token() -> None:
    gap = compare_logprobs([-1.0, -2.0, -3.0], [-1.0, -2.1, -2.7], tolerance=0.5)
    assert gap.tokens == 3
    assert gap.max == pytest.approx(0.3)
    assert gap.mean == pytest.approx(0.4 / 3)


def test_one_token_above_the_tolerance_is_a_mismatch() -> None:
    with pytest.raises(ProbeMismatchError, match=r"up to 0\.5 nats .* allowed 0\.1"):
        compare_logprobs([-1.0, -2.0], [-1.0, -2.5], tolerance=0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_never_agrees(bad: float) -> None:
    with pytest.raises(ProbeMismatchError):
        compare_logprobs([-1.0, bad], [-1.0, -1.0], tolerance=10.0)


@pytest.mark.parametrize(("served", "trained"), [([], []), ([-1.0], [])])
def test_nothing_or_unequal_numbers_of_tokens_cannot_be_compared(
    served: list[float], trained: list[float]
) -> None:
    with pytest.raises(ValueError, match="log-probabilities, trained"):
        compare_logprobs(served, trained, tolerance=1.0)
