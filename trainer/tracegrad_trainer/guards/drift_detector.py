"""Whether the mean of a stream has risen above what a baseline allows, looked at after each value.

Values are in [0, 1]. Were every value's mean, given those before it, at most `allowed`, a bet on
more, `1 + bet * (x - allowed)`, would have an expectation of at most 1. The Shiryaev-Roberts sum
over all times at which betting may have begun,

    sum(n) = (1 + sum(n - 1)) * (1 + bet * (x - allowed)),

has then an expectation of at most n: so has its mean over several bets. The first time at which it
exceeds c comes after c values or more on average, however often it is looked at, with no assumption
of independence (but repeats of a value must be one: their mean, given the first, is that): an
e-detector (Shin, Ramdas & Rinaldo, "E-detectors: a nonparametric framework
for sequential change detection", New England J. Statistics in Data Science, 2023, 2203.03532).

Where the drift began: the last time at which a bet's CUSUM, max(1, before) * factor, was at 1; of
all bets that did at least half as well as the best one, on a logarithmic scale, the earliest. Too
early only costs a few good values, too late keeps bad ones: these bets are against half the margin,
or of a slow drift all that the margin allows would be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from tracegrad.events import Json

# Of the largest bet, which would lose everything on a 0.
_BETS = (0.1, 0.25, 0.5, 0.75)
# Sums are kept finite: far above any limit.
_MOST = 1e300


@dataclass(frozen=True, slots=True)
class Drift:
    """`rise_began` is the `at` of the first value of the drift, as far as can be said."""

    baseline: float  # mean
    allowed: float
    recent: float  # mean since `rise_began`
    values: int  # since then
    evidence: float  # above the limit
    rise_began: int


@dataclass(slots=True)
class DriftDetector:
    """The first `size` values are the baseline. `at` of a value is any number that says when it
    was: a policy version."""

    size: int
    margin: float
    limit: float  # 1 / rate of false alarms
    seen: int = 0
    total: float = 0.0  # of the baseline's values
    sums: list[float] = field(default_factory=lambda: [0.0] * len(_BETS))
    cusums: list[float] = field(default_factory=lambda: [1.0] * len(_BETS))
    began: list[int] = field(default_factory=lambda: [0] * len(_BETS))
    counts: list[int] = field(default_factory=lambda: [0] * len(_BETS))
    gains: list[float] = field(default_factory=lambda: [0.0] * len(_BETS))

    def add(self, value: float, at: int) -> Drift | None:
        """The drift, if this value makes it one. Raises ValueError: not in [0, 1]."""
        if not 0 <= value <= 1:
            raise ValueError(f"value: {value} is not in [0, 1]")
        self.seen += 1
        if self.seen <= self.size:
            self.total += value
            return None
        allowed = self.allowed
        if allowed >= 1:
            return None  # no rise can be told from the baseline
        usual = self.baseline + self.margin / 2
        for index, share in enumerate(_BETS):
            factor = 1 + share / allowed * (value - allowed)
            self.sums[index] = min(_MOST, (1 + self.sums[index]) * factor)
            self._note_rise(index, 1 + share / usual * (value - usual), value, at)
        return self._drift() if self.evidence >= self.limit else None

    @property
    def baseline(self) -> float:
        return self.total / min(self.seen, self.size) if self.seen and self.size else 0.0

    @property
    def allowed(self) -> float:
        return self.baseline + self.margin

    @property
    def evidence(self) -> float:
        return sum(self.sums) / len(_BETS)

    def _note_rise(self, index: int, factor: float, value: float, at: int) -> None:
        if self.cusums[index] <= 1:
            self.cusums[index], self.began[index] = 1.0, at
            self.counts[index], self.gains[index] = 0, 0.0
        self.cusums[index] = min(_MOST, self.cusums[index] * factor)
        self.counts[index] += 1
        self.gains[index] += value

    def _drift(self) -> Drift:
        enough = max(self.cusums) ** 0.5
        good = [index for index, cusum in enumerate(self.cusums) if cusum >= enough]
        earliest = max(good, key=self.counts.__getitem__)
        values = max(1, self.counts[earliest])
        recent = self.gains[earliest] / values
        began = self.began[earliest]
        return Drift(self.baseline, self.allowed, recent, values, self.evidence, began)

    def state(self) -> Json:
        """JSON, for `restored`."""
        kept: Sequence[str] = ("seen", "total", "sums", "cusums", "began", "counts", "gains")
        every = asdict(self)
        return {name: every[name] for name in kept}

    def restored(self, state: Json) -> DriftDetector:
        """With these settings, going on from `state`."""
        return DriftDetector(self.size, self.margin, self.limit, **state)
