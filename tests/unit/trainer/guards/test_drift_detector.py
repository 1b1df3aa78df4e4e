"""The e-detector: closed forms, false alarms and delay by simulation."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracegrad_trainer.guards.drift_detector import Drift, DriftDetector


def fed(detector: DriftDetector, values: list[float]) -> Drift | None:
    """The first drift."""
    found = (detector.add(value, at) for at, value in enumerate(values))
    return next((drift for drift in found if drift is not None), None)


def test_sums_by_hand() -> None:
    """Baseline 1 of 4, so .25 + .25 is allowed: a 1 doubles a bet of .5 / .5, a 0 halves it. Where
    the rise began is looked for above .25 + .125."""
    detector = DriftDetector(size=4, margin=0.25, limit=1e9)
    assert fed(detector, [0, 1, 0, 0]) is None
    assert detector.baseline == 0.25
    assert detector.allowed == 0.5
    detector.add(1, 4)
    # By bet: .1, .25, .5 and .75 of 1 / .5.
    assert detector.sums == pytest.approx([1.1, 1.25, 1.5, 1.75])
    detector.add(0, 5)
    assert detector.sums == pytest.approx([2.1 * 0.9, 2.25 * 0.75, 2.5 * 0.5, 2.75 * 0.25])
    cusums = [(1 + bet / 0.375 * 0.625) * (1 - bet) for bet in (0.1, 0.25, 0.5, 0.75)]
    assert detector.cusums == pytest.approx(cusums)


def test_rise_is_found_where_it_began() -> None:
    detector = DriftDetector(size=64, margin=0.1, limit=1e6)
    draw = random.Random(1)
    calm = [float(draw.random() < 0.05) for _ in range(600)]
    risen = [float(draw.random() < 0.6) for _ in range(200)]
    drift = fed(detector, calm + risen)
    assert drift is not None
    assert abs(drift.rise_began - 600) <= 10
    assert drift.values == drift_end(calm + risen) - drift.rise_began + 1
    assert drift.recent == pytest.approx(0.6, abs=0.15)
    assert drift.baseline == sum(calm[:64]) / 64
    assert drift.evidence >= 1e6


def test_of_a_slow_rise_little_is_kept() -> None:
    """From a fifth to all within 4,000 values: no more is kept than the margin allows."""
    draw = random.Random(5)
    calm = [float(draw.random() < 0.2) for _ in range(1000)]
    risen = [float(draw.random() < 0.2 + 0.8 * n / 4000) for n in range(4000)]
    drift = fed(DriftDetector(size=128, margin=0.15, limit=1e6), calm + risen)
    assert drift is not None
    assert 0.2 + 0.8 * (drift.rise_began - 1000) / 4000 <= drift.allowed


def drift_end(values: list[float]) -> int:
    detector = DriftDetector(size=64, margin=0.1, limit=1e6)
    return next(at for at, value in enumerate(values) if detector.add(value, at) is not None)


def test_false_alarms_are_as_rare_as_asked_for() -> None:
    """400 runs of 1,000 values whose mean is the most that is allowed: with a limit of 10,000 the
    theorem has at most 40 alarms on average; that of a run is below 1 - (1 - 1/10,000)^1,000."""
    draw = random.Random(2)
    alarms = 0
    for _ in range(400):
        detector = DriftDetector(size=0, margin=0.2, limit=1e4)
        alarms += fed(detector, [float(draw.random() < 0.2) for _ in range(1000)]) is not None
    assert alarms <= 40


@pytest.mark.parametrize(("share", "most"), [(0.5, 90), (0.7, 40), (1.0, 20)])
def test_delay_is_short(share: float, most: int) -> None:
    """Of rises far above what is allowed (.2), with one false alarm in a million: median of 50."""
    draw = random.Random(3)
    delays = []
    for _ in range(50):
        detector = DriftDetector(size=0, margin=0.2, limit=1e6)
        values = (float(draw.random() < share) for _ in range(10_000))
        delays.append(
            next(at for at, value in enumerate(values) if detector.add(value, at) is not None)
        )
    assert sorted(delays)[25] <= most


def test_nothing_can_rise_above_all() -> None:
    detector = DriftDetector(size=4, margin=0.2, limit=2)
    assert fed(detector, [1.0] * 100) is None


@given(st.lists(st.floats(0, 1), max_size=60), st.integers(0, 60))
def test_state_goes_on_where_it_was(values: list[float], cut: int) -> None:
    whole, first = (DriftDetector(size=8, margin=0.1, limit=50) for _ in range(2))
    for at, value in enumerate(values[:cut]):
        assert first.add(value, at) == whole.add(value, at)
    kept = json.loads(json.dumps(first.state()))
    second = DriftDetector(size=8, margin=0.1, limit=50).restored(kept)
    for at, value in enumerate(values[cut:], start=cut):
        assert second.add(value, at) == whole.add(value, at)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_values_are_shares(value: float) -> None:
    with pytest.raises(ValueError, match=r"value: .* is not in"):
        DriftDetector(size=1, margin=0.1, limit=10).add(value, 0)
