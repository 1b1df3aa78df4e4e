"""How far served and trained log-probabilities of the same tokens are apart, and may be.

Bounds are by the coarser number format of the two engines. They are quantiles and a mean, not a
maximum: rounding has a long tail (a router that is undecided between two experts is worth a nat),
and what is served wrongly moves most tokens.

Without torch: settings and vLLM's own processes may import it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

# From the finest to the coarsest. bfloat16 stands for float16 and TF32 as well.
Precision = Literal["float32", "bfloat16", "fp8"]
_FINEST_FIRST: tuple[Precision, ...] = ("float32", "bfloat16", "fp8")


@dataclass(frozen=True, slots=True)
class GapBounds:
    """What a right push stays within: |served - trained| in nats."""

    p50: float
    p99: float
    mean: float


# Seen of right pushes on a CPU (median, 99 %, mean): models of 2 to 24 layers, trained ones and
# random ones, which are the worst, against transformers in the other format. float32 5e-7, 3e-6,
# 7e-7; bfloat16 against float32 .005 to .012, .03 to .05, .008 to .014; fp8 (e4m3, a scale a
# tensor, activations too) .02 to .12, .13 to .52, .02 to .14. The tails leave room for the routers
# of large mixtures.
BOUNDS: dict[Precision, GapBounds] = {
    "float32": GapBounds(p50=1e-4, p99=1e-3, mean=1e-3),
    "bfloat16": GapBounds(p50=0.05, p99=1.0, mean=0.15),
    "fp8": GapBounds(p50=0.2, p99=1.5, mean=0.25),
}

# Fewer tokens have no 99 % quantile but their largest, which may be any one's.
TOKENS_FOR_P99 = 100
# Of fewer the median may be any one's as well: of one token in fp8 it is above its bound every
# fourth time. What is served wrongly in all of them is still seen by the bound of the tail.
TOKENS_FOR_P50 = 32


def coarser(*given: Precision) -> Precision:
    return max(given, key=_FINEST_FIRST.index)


def precision_of(dtype: object) -> Precision:
    """Of torch's dtype, or of its name."""
    name = str(dtype).removeprefix("torch.")
    if "fp8" in name or "float8" in name:
        return "fp8"
    return "float32" if name in ("float32", "float64", "float") else "bfloat16"


def served_precision(dtype: object, *, on_cpu: bool) -> Precision:
    """Of what vLLM serves in this dtype. On a GPU its attention in float32 is Triton's, whose
    products are in TF32."""
    found = precision_of(dtype)
    return found if on_cpu else coarser(found, "bfloat16")


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """|served - trained| per token, in nats: half of the tokens, and all but one in a hundred,
    are at most `p50` and `p99` apart."""

    tokens: int
    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, gaps: Sequence[float]) -> LogprobGap:
        """Of at least one token's."""
        ordered, n = sorted(gaps), len(gaps)
        p50, p99 = (ordered[math.ceil(share * n) - 1] for share in (0.5, 0.99))
        return cls(n, math.fsum(gaps) / n, p50, p99, ordered[-1])

    def within(self, bounds: GapBounds) -> bool:
        held = self._held(bounds)
        # Not the other way round: what is not a number is within nothing.
        return self.p50 <= held.p50 and self.p99 <= held.p99 and self.mean <= held.mean

    def describe(self, bounds: GapBounds) -> str:
        """`0.2 nats in the median (allowed 0.05), 1.3 at 99 % (1), 0.31 in the mean (0.15)`."""
        held = self._held(bounds)
        return (
            f"{self.p50:.2g} nats in the median (allowed {held.p50:g}), {self.p99:.2g} at 99 %"
            f" ({held.p99:g}) and {self.mean:.2g} in the mean ({held.mean:g})"
        )

    def _held(self, bounds: GapBounds) -> GapBounds:
        """What so many tokens can be held against."""
        if self.tokens < TOKENS_FOR_P50:
            return GapBounds(bounds.p99, math.inf, bounds.p99)
        return bounds if self.tokens >= TOKENS_FOR_P99 else replace(bounds, p99=math.inf)


# Gaps of a step are counted in bins, which add up over micro-batches and ranks. A bin is an eighth
# of an octave wide (9 %); the first holds everything up to what float32 can tell apart.
_LOWEST, _HIGHEST = -24, 6  # powers of two, nats
BINS_PER_OCTAVE = 8
BINS = (_HIGHEST - _LOWEST) * BINS_PER_OCTAVE + 1
LOWEST_GAP, HIGHEST_GAP = 2.0**_LOWEST, 2.0**_HIGHEST


def binned_quantile(counts: Iterable[float], share: float) -> float:
    """The upper end of the bin in which so large a share of the counted is reached; 0 of none."""
    counts = list(counts)
    wanted, seen = share * sum(counts), 0.0
    for number, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return LOWEST_GAP * 2 ** (number / BINS_PER_OCTAVE) if number else 0.0
    return 0.0
