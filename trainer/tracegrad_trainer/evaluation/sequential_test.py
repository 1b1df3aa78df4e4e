"""Whether a candidate's rewards are better than those of what is promoted, at any time.

A fixed-size test that is looked at after each rollout says "significant" far more often than its
level. This one may be looked at always: its e-values are minima of test martingales, and by Ville's
inequality one exceeds 1/alpha, ever, with a probability of at most alpha.

For one arm with independent rewards in [0, 1] and a bet theta, the capital

    K(m) = product over x of (1 - theta + theta * x / m)

has an expectation of at most 1 as long as the mean is at most m: it is evidence that the mean is
above m. It is averaged over a few fixed bets (a mixture, so that no bet depends on what it bets on,
and the order of rewards does not matter): Waudby-Smith & Ramdas, "Estimating means of bounded
random variables by betting", JRSS B 86 (2024), section 4. Evidence that the mean is below m is the
same of 1 - x and 1 - m.

Of two arms, "the candidate's mean is at most the other's" says that some m lies between the two.
For that m the product of "the candidate is above m" and "the other is below m" is a test
martingale, whatever the arms' sizes and whichever is sampled when; m is unknown, so the least
product over all m counts. Between two points of the grid of m, each factor is taken at the end
where it is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["improved", "inconclusive", "regressed"]

_GRID = np.linspace(0.0, 1.0, 201)
_BETS = np.array([1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4])[:, None]


class RewardSample:
    """The rewards of one arm, between `low` and `high`; others count as the nearer bound."""

    def __init__(self, low: float = 0.0, high: float = 1.0, rewards: Iterable[float] = ()) -> None:
        if not low < high:
            raise ValueError(f"low: {low} is not below high ({high})")
        self.low, self.high = low, high
        self.count = 0
        self.outside = 0  # rewards that were beyond a bound
        self._sum = 0.0
        # By bet and point of the grid: log capital on a mean above (at its points but 0) and below.
        self._above = np.zeros((len(_BETS), len(_GRID) - 1))
        self._below = np.zeros((len(_BETS), len(_GRID) - 1))
        for reward in rewards:
            self.add(reward)

    def add(self, reward: float) -> None:
        if not math.isfinite(reward):
            raise ValueError(f"reward: {reward} is not finite")
        share = (reward - self.low) / (self.high - self.low)
        self.outside += not 0 <= share <= 1
        share = min(max(share, 0.0), 1.0)
        self.count += 1
        self._sum += share
        self._above += np.log1p(_BETS * (share / _GRID[1:] - 1))
        self._below += np.log1p(_BETS * ((1 - share) / (1 - _GRID[:-1]) - 1))

    @property
    def mean(self) -> float | None:
        if not self.count:
            return None
        return self.low + self._sum / self.count * (self.high - self.low)

    def log_above(self) -> NDArray[np.float64]:
        """Log evidence that the mean is above each point of the grid but the first; it falls."""
        return _mixture(self._above)

    def log_below(self) -> NDArray[np.float64]:
        """Log evidence that it is below each point but the last; it rises."""
        return _mixture(self._below)

    def interval(self, alpha: float) -> tuple[float, float]:
        """Of the mean: misses it, ever, with a probability of at most `alpha`."""
        bound = math.log(2 / alpha)
        above, below = self.log_above() >= bound, self.log_below() >= bound
        low = float(_GRID[1:][above].max(initial=0.0))
        high = float(_GRID[:-1][below].min(initial=1.0))
        width = self.high - self.low
        return self.low + low * width, self.low + high * width


@dataclass(frozen=True, slots=True)
class Comparison:
    """`difference`: an interval of candidate less baseline, in rewards, that misses it, ever, with
    a probability of at most `alpha`. `e_improved`, `e_regressed`: at 1/alpha the verdict is that.
    """

    verdict: Verdict
    alpha: float
    n_candidate: int
    n_baseline: int
    mean_candidate: float | None
    mean_baseline: float | None
    difference: tuple[float, float]
    e_improved: float
    e_regressed: float
    outside: int  # rewards beyond the bounds, of both


def compare(candidate: RewardSample, baseline: RewardSample, alpha: float) -> Comparison:
    """Each of the two verdicts is wrong, however often this is asked, with a probability of at most
    `alpha`. ValueError: alpha is no level, or the arms have other bounds."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha: {alpha} is no level; give one above 0 and below 1, such as 0.05")
    if (candidate.low, candidate.high) != (baseline.low, baseline.high):
        raise ValueError("low, high: the two arms have different bounds")
    improved, regressed = _evidence(candidate, baseline), _evidence(baseline, candidate)
    level = math.log(1 / alpha)
    verdict: Verdict = "inconclusive"
    if max(improved, regressed) >= level:
        verdict = "improved" if improved > regressed else "regressed"
    low, high = candidate.interval(alpha / 2)
    other_low, other_high = baseline.interval(alpha / 2)
    return Comparison(
        verdict=verdict,
        alpha=alpha,
        n_candidate=candidate.count,
        n_baseline=baseline.count,
        mean_candidate=candidate.mean,
        mean_baseline=baseline.mean,
        difference=(low - other_high, high - other_low),
        e_improved=_exp(improved),
        e_regressed=_exp(regressed),
        outside=candidate.outside + baseline.outside,
    )


def _evidence(better: RewardSample, worse: RewardSample) -> float:
    """Log of that one's mean is above the other's: its least over all m."""
    return float((better.log_above() + worse.log_below()).min())


def _mixture(log_capital: NDArray[np.float64]) -> NDArray[np.float64]:
    most = log_capital.max(axis=0)
    found: NDArray[np.float64] = most + np.log(np.exp(log_capital - most).mean(axis=0))
    return found


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
