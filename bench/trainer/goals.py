"""What training is meant to reach, and whether this run did."""

from __future__ import annotations

from collections.abc import Sequence

from bench.tables import Goal
from bench.trainer.building import Building
from bench.trainer.head import HeadMemory
from bench.trainer.rollouts import LONG
from bench.trainer.rounds import Steps
from bench.trainer.work import PLAIN, TRL_CALL, TRL_ROLLOUT

OF_PLAIN = 0.9
OVER_ROLLOUT = 1.3
OVER_CALL = 5.0
TOKENS_BUILT_PER_S = 500_000
# The same at every size, apart from what an allocator rounds up.
SAME = 1.25


def goals(
    steps: Sequence[Steps], buildings: Sequence[Building], heads: Sequence[HeadMemory]
) -> list[Goal]:
    return [
        *(goal for one in steps for goal in _speed(one)),
        *(_building(one) for one in buildings),
        *_head(heads),
    ]


def _speed(steps: Steps) -> list[Goal]:
    name = steps.shape.name
    found = [
        _at_least(f"speed over the {PLAIN}'s, {name}", steps.times(PLAIN), OF_PLAIN),
        _at_least(f"speed over {TRL_ROLLOUT}, {name}", steps.times(TRL_ROLLOUT), OVER_ROLLOUT),
    ]
    if steps.shape == LONG:  # where a call repeats what the calls before it had
        found.append(_at_least(f"speed over {TRL_CALL}, {name}", steps.times(TRL_CALL), OVER_CALL))
    return found


def _at_least(what: str, measured: float, wanted: float) -> Goal:
    return Goal(what, f"at least {wanted:g}", f"{measured:.2f}", measured >= wanted)


def _building(one: Building) -> Goal:
    return Goal(
        f"tokens/s of building batches, {one.shape.name}",
        f"at least {TOKENS_BUILT_PER_S:,}",
        f"{one.tokens_per_s:,.0f}",
        one.tokens_per_s >= TOKENS_BUILT_PER_S,
    )


def _head(heads: Sequence[HeadMemory]) -> list[Goal]:
    """Between the sizes with the most and the fewest logits."""
    if len(heads) < 2:
        return []
    low, high = (choose(heads, key=lambda one: one.logits) for choose in (min, max))
    times = high.ours / low.ours
    return [
        Goal(
            "memory of the log-probabilities' head,"
            f" {high.logits / low.logits:.0f} times as much vocabulary x sequence",
            f"at most {SAME:g} times",
            f"{times:.2f} times",
            times <= SAME,
        )
    ]
