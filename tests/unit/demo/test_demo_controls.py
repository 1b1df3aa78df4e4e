"""When a control is said to have risen, and a seed not to."""

from __future__ import annotations

import pytest
from examples.shop.controls import Measured, variants

SEED, *_, STILL, SHUFFLED = variants(seeds=1, model_seeds=False)


@pytest.mark.parametrize(
    ("variant", "after", "wrong"),
    [
        (SEED, 0.51, None),
        (SEED, 0.49, "rose by +0.19; at least +0.20 is expected"),
        (STILL, 0.46, None),
        (STILL, 0.48, "rose by +0.18, more than chance (0.17)"),
        (STILL, 0.10, None),
        (SHUFFLED, 0.49, None),
        (SHUFFLED, 0.51, "rose by +0.21, more than chance (0.20)"),
    ],
)
def test_what_a_run_must_do(variant: object, after: float, wrong: str | None) -> None:
    measured = Measured(variant, before=0.30, after=after, tasks=150, versions=17)  # type: ignore[arg-type]
    assert measured.verdict(required=0.2, seeds=0.4) == wrong


def test_where_seeds_hardly_rise_shuffled_rewards_may_not_either() -> None:
    measured = Measured(SHUFFLED, before=0.30, after=0.48, tasks=150, versions=17)
    assert measured.verdict(required=0.2, seeds=0.25) is not None
