"""The statistics of the soak: what leaks is found, what is flat is not."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from bench.soak.trends import Series, compare, mean, quantile, theil_sen, trend

# As a soak samples it: 20 minutes, every 5 seconds.
TIMES = np.arange(0, 1200, 5.0)


def autocorrelated(seed: int, scale: float) -> np.ndarray:
    """AR(1) of standard deviation `scale`: each sample is mostly the one before it."""
    random = np.random.default_rng(seed)
    values = np.zeros(len(TIMES))
    for at in range(1, len(values)):
        values[at] = 0.8 * values[at - 1] + 0.6 * random.normal()
    return scale * values


def test_a_line_has_its_slope() -> None:
    assert theil_sen(TIMES, 3 + 0.25 * TIMES) == pytest.approx(0.25)
    found = trend(TIMES.tolist(), (3 + 0.25 * TIMES).tolist())
    assert found is not None
    assert found.growth.value == pytest.approx(0.25 * 1170, rel=0.01)  # between middles of bins
    assert found.growth.low == pytest.approx(found.growth.high)


def test_a_third_of_wild_samples_moves_no_slope() -> None:
    values = 100 + 0.01 * TIMES
    values[::4] = 1e6
    assert theil_sen(TIMES, values) == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize("seed", range(20))
def test_a_flat_noisy_series_is_flat(seed: int) -> None:
    found = trend(TIMES.tolist(), (200 + autocorrelated(seed, 1.0)).tolist())
    assert found is not None
    assert not found.is_growing(0.02 * found.level)


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_is_found(seed: int) -> None:
    """3 % in the window, with noise of half a percent."""
    values = 200 + 6 * TIMES / TIMES[-1] + autocorrelated(seed, 1.0)
    found = trend(TIMES.tolist(), values.tolist())
    assert found is not None
    assert found.growth.low > 0
    assert found.is_growing(0.01 * found.level)


def test_a_sawtooth_is_flat() -> None:
    """What a garbage collector or a write-ahead log looks like."""
    found = trend(TIMES.tolist(), (200 + 10 * (TIMES % 90) / 90).tolist())
    assert found is not None
    assert not found.is_growing(0.02 * found.level)


def test_a_flat_line_does_not_grow() -> None:
    found = trend(TIMES.tolist(), [7.0] * len(TIMES))
    assert found is not None
    assert (found.level, found.growth.value, found.growth.high) == (7, 0, 0)
    assert not found.is_growing(0)


def test_few_samples_say_nothing() -> None:
    assert trend([0, 5, 10], [1, 2, 3]) is None
    few = Series([0.0, 1.0], [1.0, 1.0])
    assert compare(few, few, mean, operator.sub) is None


def calls(seed: int, scale: float) -> Series:
    random = np.random.default_rng(seed)
    times = np.sort(random.uniform(0, 600, 300))
    return Series(times.tolist(), (scale * random.lognormal(0, 0.5, 300)).tolist())


def test_the_ratio_of_equal_windows_has_one_within_its_interval() -> None:
    inside = 0
    for seed in range(20):
        found = compare(calls(seed, 2.0), calls(seed + 100, 2.0), quantile(0.5), operator.truediv)
        assert found is not None
        assert found.low < found.value < found.high
        inside += found.low <= 1 <= found.high
    assert inside >= 16  # 95 % of 20 are 19


def test_a_drift_is_found() -> None:
    found = compare(calls(1, 2.0), calls(2, 3.0), quantile(0.5), operator.truediv, confidence=0.99)
    assert found is not None
    assert found.low > 1.15
    assert found.low < 1.5 < found.high


def test_a_scaled_window_has_exactly_its_factor() -> None:
    before = calls(3, 1.0)
    after = Series(before.times, [3 * value for value in before.values])
    found = compare(before, after, quantile(0.95), operator.truediv)
    assert found is not None
    assert found.value == pytest.approx(3)


def test_blocks_that_hang_together_widen_the_interval() -> None:
    """Calls that wait for one push are late together: they are one piece of evidence."""
    random = np.random.default_rng(0)
    times = np.arange(0, 600, 1.0)
    pushes = np.repeat(random.lognormal(0, 1, 30), 20)
    held = Series(times.tolist(), pushes.tolist())
    alone = Series(times.tolist(), random.permutation(pushes).tolist())
    wide = compare(held, held, mean, operator.truediv)
    narrow = compare(alone, alone, mean, operator.truediv)
    assert wide is not None
    assert narrow is not None
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)
