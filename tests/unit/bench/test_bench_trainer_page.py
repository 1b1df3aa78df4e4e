"""From figures of training to its page: what counts as met, and what is printed."""

from __future__ import annotations

import pytest
from bench.trainer.building import Building
from bench.trainer.goals import goals
from bench.trainer.head import HeadMemory
from bench.trainer.process import Memory
from bench.trainer.report import page
from bench.trainer.rollouts import LONG, MIXED, Shape
from bench.trainer.rounds import Steps
from bench.trainer.work import OURS, PEERS, PLAIN, TRL_CALL, TRL_ROLLOUT


def timed(
    ours: list[float],
    plain: list[float],
    by_rollout: list[float],
    by_call: list[float],
    shape: Shape = LONG,
) -> Steps:
    return Steps(
        shape,
        8,
        12_000,
        6_000,
        130_000,
        dict(zip(PEERS, (ours, plain, by_rollout, by_call), strict=True)),
        {name: Memory(10**9, 2 * 10**9) for name in PEERS},
        {OURS: 3e-7, PLAIN: 0.0, TRL_ROLLOUT: 2e-6, TRL_CALL: 1e-6},
    )


@pytest.mark.parametrize(
    ("plain", "by_rollout", "by_call", "met"),
    [
        (0.9, 1.3, 5.0, [True, True, True]),
        (0.89, 1.29, 4.99, [False, False, False]),
        (2.0, 1.0, 9.0, [True, False, True]),
    ],
)
def test_speeds_over_the_peers(
    plain: float, by_rollout: float, by_call: float, met: list[bool]
) -> None:
    found = goals([timed([1.0], [plain], [by_rollout], [by_call])], [], [])
    assert [goal.met for goal in found] == met


def test_a_row_a_call_has_a_goal_only_where_calls_repeat_what_came_before() -> None:
    found = goals([timed([1.0], [1.0], [2.0], [1.1], MIXED)], [], [])
    assert [goal.met for goal in found] == [True, True]
    assert not any(TRL_CALL in goal.what for goal in found)


def test_a_slow_round_is_slow_for_all_peers() -> None:
    steps = timed([1.0, 10.0, 2.0], [2.0, 20.0, 3.0], [1.0] * 3, [1.0] * 3)
    assert steps.times(PLAIN) == 2.0, "the median of 2, 2 and 1.5"
    assert steps.times(OURS) == 1.0
    assert steps.tokens_per_s(OURS) == 6_000


@pytest.mark.parametrize(("seconds", "met"), [(0.2, True), (0.201, False)])
def test_half_a_million_tokens_a_second_are_built(seconds: float, met: bool) -> None:
    [goal] = goals([], [Building(LONG, 64, 100_000, seconds)], [])
    assert goal.met is met


def test_the_heads_memory_is_compared_between_the_fewest_and_the_most_logits() -> None:
    heads = [
        HeadMemory(8, 4_000, 125, None),
        HeadMemory(2, 1_000, 100, 7_000),
        HeadMemory(4, 2_000, 900, 9_000),
    ]
    [goal] = goals([], [], heads)
    assert "16 times as much" in goal.what
    assert goal.measured == "1.25 times"
    assert goal.met
    [goal] = goals([], [], [HeadMemory(2, 1_000, 100, None), HeadMemory(8, 4_000, 126, None)])
    assert not goal.met
    assert goals([], [], heads[:1]) == [], "one size says nothing"


def test_the_page_has_every_figure() -> None:
    text = page(
        made=["today"],
        machine=["a machine"],
        steps=[timed([4.0, 4.0], [3.8, 3.8], [6.0, 6.0], [44.0, 44.0])],
        buildings=[Building(MIXED, 64, 100_000, 0.1)],
        heads=[HeadMemory(2_048, 32_768, 250 * 10**6, 10**9), HeadMemory(8, 10**8, 10**6, None)],
    )
    assert "- today\n- a machine\n" in text
    assert "| tracegrad | 4.00 | 3,000 | 1.00 | 1,000 | 2,000 | 3e-07 |" in text
    assert "| TRL, a row a call | 44.0 | 273 | 11.00 |" in text
    assert (
        "8 rollouts of 12,000 tokens, 6,000 of them sampled; the calls together have 130,000"
        in text
    )
    assert "| short mixed | 64 | 100,000 | 100 | 1,000,000 |" in text
    assert "| 2,048 | 32,768 | 268 | 250 | 1,000 |" in text
    assert "| 8 | 100,000,000 | 3,200 | 1.00 |  |" in text
    assert "| speed over the plain loop's, 20 turns | at least 0.9 | 0.95 | yes |" in text
    assert "| speed over TRL, a row a call, 20 turns | at least 5 | 11.00 | yes |" in text
