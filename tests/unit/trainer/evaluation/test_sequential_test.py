"""The sequential test: its level under peeking, its power, and its closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracegrad_trainer.evaluation.sequential_test import Comparison, RewardSample, compare

ALPHA = 0.05
RUNS, LENGTH = 150, 120


def first_verdict(
    random: np.random.Generator, p: float, q: float, *, peek: int = 4
) -> Comparison | None:
    """Of two arms of coin flips that are looked at again and again; None: there was none."""
    candidate, baseline = RewardSample(), RewardSample()
    for i in range(LENGTH):
        candidate.add(float(random.random() < p))
        baseline.add(float(random.random() < q))
        if i % peek == peek - 1:
            found = compare(candidate, baseline, ALPHA)
            if found.verdict != "inconclusive":
                return found
    return None


@pytest.mark.parametrize("mean", [0.1, 0.5, 0.9])
def test_equal_arms_are_called_different_at_most_at_the_level(mean: float) -> None:
    random = np.random.default_rng(7)
    found = [first_verdict(random, mean, mean) for _ in range(RUNS)]
    verdicts = [one.verdict for one in found if one is not None]
    # Of 150 runs at a rate of 0.05 more than 15 come with a probability below 0.005.
    assert verdicts.count("improved") <= 15
    assert verdicts.count("regressed") <= 15


def test_a_worse_candidate_is_not_called_improved() -> None:
    random = np.random.default_rng(8)
    found = [first_verdict(random, 0.4, 0.5) for _ in range(RUNS)]
    assert sum(one is not None and one.verdict == "improved" for one in found) <= 2


def test_power() -> None:
    """Within 120 rollouts an arm: of 0.8 against 0.5 nearly all runs are decided, rightly."""
    random = np.random.default_rng(9)
    found = [first_verdict(random, 0.8, 0.5) for _ in range(60)]
    assert sum(one is not None and one.verdict == "improved" for one in found) >= 50
    found = [first_verdict(random, 0.5, 0.8) for _ in range(60)]
    assert sum(one is not None and one.verdict == "regressed" for one in found) >= 50


rewards = st.lists(st.floats(0, 1), min_size=0, max_size=30)


@given(candidate=rewards, baseline=rewards)
def test_order_does_not_matter_and_the_arms_are_mirrored(
    candidate: list[float], baseline: list[float]
) -> None:
    there = compare(RewardSample(rewards=candidate), RewardSample(rewards=baseline), ALPHA)
    shuffled = RewardSample(rewards=sorted(candidate))
    again = compare(shuffled, RewardSample(rewards=sorted(baseline, reverse=True)), ALPHA)
    assert again.e_improved == pytest.approx(there.e_improved, rel=1e-6)
    back = compare(RewardSample(rewards=baseline), RewardSample(rewards=candidate), ALPHA)
    assert back.e_regressed == pytest.approx(there.e_improved, rel=1e-9)
    assert back.difference == pytest.approx((-there.difference[1], -there.difference[0]))
    assert there.difference[0] <= there.difference[1]


@given(some=rewards)
def test_bounds_are_a_matter_of_scale(some: list[float]) -> None:
    plain = RewardSample(rewards=some)
    scaled = RewardSample(-1.0, 3.0, [4 * x - 1 for x in some])
    low, high = plain.interval(ALPHA)
    assert scaled.interval(ALPHA) == pytest.approx((4 * low - 1, 4 * high - 1))
    if some:
        assert scaled.mean == pytest.approx(4 * np.mean(some) - 1)
        assert low <= np.mean(some) + 1e-9
        assert high >= np.mean(some) - 1e-9


BETS = [1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4]


def capital(some: list[float], mean: float) -> float:
    return sum(math.prod(1 - bet + bet * x / mean for x in some) for bet in BETS) / len(BETS)


def test_intervals_end_where_the_evidence_does() -> None:
    """Each end is wrong with half of the probability, and of a difference with a quarter."""
    arms = [1.0] * 25 + [0.25] * 4, [0.0] * 25 + [0.75] * 3
    grid = [point / 200 for point in range(201)]

    def ends(some: list[float], wrong: float) -> tuple[float, float]:
        other = [1 - x for x in some]
        above = [m for m in grid[1:] if capital(some, m) >= 1 / wrong]
        below = [m for m in grid[:-1] if capital(other, 1 - m) >= 1 / wrong]
        return max(above), min(below)

    candidate, baseline = (RewardSample(rewards=some) for some in arms)
    for arm, some in ((candidate, arms[0]), (baseline, arms[1])):
        assert arm.interval(ALPHA) == pytest.approx(ends(some, ALPHA / 2))
    (low, high), (other_low, other_high) = (ends(some, ALPHA / 4) for some in arms)
    found = compare(candidate, baseline, ALPHA)
    assert found.difference == pytest.approx((low - other_high, high - other_low))


def test_one_bet_by_hand() -> None:
    """One reward of 1: each bet's capital is 1 - theta + theta / m, and they are averaged."""
    sample = RewardSample(rewards=[1.0])
    at_half = sum(1 - bet + 2 * bet for bet in BETS) / len(BETS)
    assert sample.log_above()[99] == pytest.approx(math.log(at_half))  # the grid's 0.5


def test_no_rewards_say_nothing() -> None:
    found = compare(RewardSample(), RewardSample(), ALPHA)
    assert found.verdict == "inconclusive"
    assert found.e_improved == found.e_regressed == 1
    assert found.difference == (-1, 1)
    assert found.mean_candidate is None


def test_rewards_beyond_the_bounds_are_counted() -> None:
    sample = RewardSample(rewards=[2.0, -1.0, 0.5])
    assert (sample.count, sample.outside) == (3, 2)
    assert sample.mean == pytest.approx(0.5)


def test_wrong_use_is_named() -> None:
    with pytest.raises(ValueError, match="low: 1"):
        RewardSample(1.0, 0.0)
    with pytest.raises(ValueError, match="reward: nan"):
        RewardSample().add(math.nan)
    with pytest.raises(ValueError, match="alpha: 1"):
        compare(RewardSample(), RewardSample(), 1.0)
    with pytest.raises(ValueError, match="bounds"):
        compare(RewardSample(), RewardSample(0, 2), ALPHA)
