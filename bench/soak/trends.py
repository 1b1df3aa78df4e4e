"""Whether a series grows, and whether a later window differs from an earlier one.

Samples of one process, and calls that wait for the same push, are not independent: intervals are of
bootstraps over blocks of neighbours, which a plain bootstrap would make too narrow (Kunsch 1989,
The jackknife and the bootstrap for general stationary observations).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], float]

RESAMPLES = 1000
_BINS = 40
_BLOCK = 4  # bins: what comes again sooner (a step, a push, a checkpoint) is no trend
_LEAST_BINS = 3 * _BLOCK
_LEAST_BLOCKS = 5


class Series(NamedTuple):
    """`times` in seconds, and a value at each."""

    times: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, and where it lies with the confidence that was asked for."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Trend:
    """`level`: the median of the series. `growth`: over the whole window, in the series' unit."""

    level: float
    growth: Interval

    def is_growing(self, least: float) -> bool:
        """Surely, and by more than `least`."""
        return self.growth.low > 0 and self.growth.value > least


def theil_sen(times: Floats, values: Floats) -> float:
    """The median of the slopes through all pairs of points (Sen 1968): a third of the points may be
    anything."""
    first, second = np.triu_indices(len(times), k=1)
    return float(np.median((values[second] - values[first]) / (times[second] - times[first])))


def trend(
    times: Sequence[float], values: Sequence[float], *, confidence: float = 0.95, seed: int = 0
) -> Trend | None:
    """Of medians of up to 40 equal stretches of time; None: there are too few samples to say."""
    at, binned = _binned(np.asarray(times, float), np.asarray(values, float))
    if len(at) < _LEAST_BINS:
        return None
    slope = theil_sen(at, binned)
    rest = binned - slope * at
    rest -= np.median(rest)
    random = np.random.default_rng(seed)
    # Blocks of residuals, wherever they begin, put together anew around the line.
    blocks = -(-len(at) // _BLOCK)
    starts = random.integers(0, len(at) - _BLOCK + 1, size=(RESAMPLES, blocks))
    picks = (starts[:, :, None] + np.arange(_BLOCK)).reshape(RESAMPLES, -1)[:, : len(at)]
    slopes = [theil_sen(at, slope * at + rest[pick]) for pick in picks]
    low, high = _ends(np.asarray(slopes), confidence)
    window = float(at[-1] - at[0])
    growth = Interval(slope * window, low * window, high * window)
    return Trend(float(np.median(binned)), growth)


def compare(
    earlier: Series,
    later: Series,
    statistic: Statistic,
    how: Callable[[float, float], float],
    *,
    block_s: float = 20.0,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval | None:
    """`how(statistic of later, statistic of earlier)`: `operator.truediv` for a ratio, or `sub`.

    Args:
        block_s: what is closer together than this is drawn together.

    None: there are too few blocks to say.
    """
    before, after = _blocks(*earlier, block_s), _blocks(*later, block_s)
    if min(len(before), len(after)) < _LEAST_BLOCKS:
        return None
    random = np.random.default_rng(seed)

    def drawn(blocks: list[Floats]) -> float:
        picks = random.integers(0, len(blocks), size=len(blocks))
        return statistic(np.concatenate([blocks[pick] for pick in picks]))

    value = how(statistic(np.concatenate(after)), statistic(np.concatenate(before)))
    some = np.asarray([how(drawn(after), drawn(before)) for _ in range(RESAMPLES)])
    return Interval(value, *_ends(some, confidence))


def quantile(share: float) -> Statistic:
    return lambda values: float(np.quantile(values, share))


def mean(values: Floats) -> float:
    return float(values.mean())


def _binned(times: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Medians of equal stretches of time, those without a sample left out."""
    if len(times) <= _BINS:
        return times, values
    edges = np.linspace(times.min(), times.max(), _BINS + 1)
    bins = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, _BINS - 1)
    filled = np.unique(bins)
    at = np.asarray([times[bins == one].mean() for one in filled])
    return at, np.asarray([np.median(values[bins == one]) for one in filled])


def _blocks(times: Sequence[float], values: Sequence[float], block_s: float) -> list[Floats]:
    numbers = np.floor(np.asarray(times, float) / block_s)
    array = np.asarray(values, float)
    return [array[numbers == number] for number in np.unique(numbers)]


def _ends(values: Floats, confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)
