"""What batches read off turns for objectives by turn: states, experts, and failures at length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from support.trainer.batch_samples import Rollout, Task, selected
from support.trainer.row_samples import turn
from tracegrad.events import Turn
from tracegrad_trainer.batches.select import AdvantageFunction
from tracegrad_trainer.batches.turn_access import (
    demonstration_outcomes,
    is_demonstration,
    state_before,
)
from tracegrad_trainer.losses import compute_advantages, preset


def objective(name: str, **changes: Any) -> AdvantageFunction:
    return partial(compute_advantages, preset(name, **changes), memory={})


def one(name: str, **changes: Any) -> Turn:
    return turn(name, [1, 2, 3], [4, 5], **changes)


def expert(name: str, **said: Any) -> Turn:
    return one(name, sampling={"source": "demonstration", **said})


def test_a_demonstration_is_one_in_the_words_of_earlier_stores_too() -> None:
    assert is_demonstration(expert("a"))
    assert is_demonstration(one("b", sampling={"source": "expert"}))
    assert not is_demonstration(one("c", sampling={"source": "engine"}))


def rollouts(*turns: Sequence[Turn], rewards: Sequence[float]) -> Task:
    return Task(
        "g",
        [Rollout(f"r{i}", r, list(t)) for i, (t, r) in enumerate(zip(turns, rewards, strict=True))],
    )


def test_turns_are_compared_by_the_key_that_was_given_else_by_what_was_observed() -> None:
    seen = "0f" * 16
    keys = [
        state_before(one("a", state_key=seen)),
        state_before(one("b", observation=seen)),
        state_before(one("c", state_key=seen, observation="aa" * 16)),
        state_before(one("d")),
        state_before(expert("e")),
    ]
    assert keys[0] == keys[2] != keys[1]
    assert keys[1] is not None
    assert keys[3] is None
    assert keys[4] is None


def test_a_state_is_not_the_prompt_that_led_to_it() -> None:
    """Other prompts, the same state: compared. The same prompt, other states: not."""
    one_way = [turn("a", [1], [2]), turn("b", [1, 2, 3], [4], state_key="door")]
    other_way = [turn("c", [7], [8]), turn("d", [7, 8, 9], [4], state_key="door")]
    task = rollouts(one_way, other_way, rewards=[1.0, 0.0])
    chosen = selected([task], advantages=objective("gigpo"))
    by_turn = {t: float(r.advantage[r.turn_index == i][0]) for r in chosen.rows
               for i, t in enumerate(r.turn_ids)}  # fmt: skip
    assert by_turn["b"] - by_turn["a"] == pytest.approx(2**-0.5, rel=1e-4)
    assert by_turn["d"] - by_turn["c"] == pytest.approx(-(2**-0.5), rel=1e-4)
    assert chosen.stats["states_given"] == 2
    assert chosen.stats["states_observed"] == 0
    assert chosen.stats["states_unknown"] == 2


def test_an_experts_turn_says_what_the_expert_came_to() -> None:
    turns = [expert("a"), expert("b", reward=0.5, distance=7), one("c"), expert("d")]
    assert demonstration_outcomes(turns) == {0: (1.0, 3), 1: (0.5, 7), 3: (1.0, 0)}
    assert demonstration_outcomes([one("a")]) == {}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"reward": "much"}, r"sampling\.reward of expert turn a: 'much'"),
        ({"reward": float("nan")}, r"sampling\.reward of expert turn a: nan"),
        ({"distance": -1}, r"sampling\.distance of expert turn a: -1; write how many turns"),
        ({"distance": 0.5}, r"sampling\.distance of expert turn a: 0\.5"),
    ],
)
def test_what_an_expert_cannot_have_come_to_is_refused(said: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        demonstration_outcomes([expert("a", **said)])


@pytest.mark.parametrize("centre", [False, True])
def test_an_expert_is_imitated_where_nobody_succeeded(centre: bool) -> None:
    """Where every continuation failed there is nothing else to learn from."""
    task = rollouts(
        [expert("a", distance=1), expert("b", distance=0), one("c")],
        [expert("d", distance=1), expert("e", distance=0), one("f")],
        rewards=[0.0, 0.0],
    )
    ipa = objective("ipa", gamma=0.5, centre=centre)
    chosen = selected([task], advantages=ipa, drop_equal_reward=centre)
    assert {t for t in chosen.trained if t in "abde"} == {*"abde"}
    found = sorted(
        float(row.advantage[row.turn_index == i][0])
        for row in chosen.rows
        for i, name in enumerate(row.turn_ids)
        if name in "abde"
    )
    assert found == [0.5, 0.5, 1.0, 1.0]
    skipped = dict.fromkeys("cf", "equal_reward") if centre else {}
    assert chosen.skipped == skipped
    off = objective("ipa", centre=centre, imitation=0.0)
    nothing = selected([task], advantages=off, drop_equal_reward=True)
    assert not nothing.trained


def test_failures_at_great_length_are_left_out_and_counted() -> None:
    short, long = [one("a")], [expert("b"), one("c"), one("d"), one("e")]
    won = [one("f"), one("g"), one("h")]
    task = rollouts(short, long, won, rewards=[0.0, 0.0, 1.0])
    ipa = objective("ipa", centre=True)
    for bound in ({"negative_max_tokens": 5}, {"negative_max_turns": 2}):
        chosen = selected([task], advantages=ipa, **bound)
        assert chosen.skipped == dict.fromkeys("cde", "long_negative")
        assert chosen.stats["skipped_long_negative"] == 3
        assert "b" in chosen.trained, "an expert's turns are no failure"
    for bound in ({"negative_max_tokens": 6}, {"negative_max_turns": 3}, {}):
        assert selected([task], advantages=ipa, **bound).skipped == {}
    # A return of 0 is a failure's as well.
    plain = objective("ipa", centre=False)
    chosen = selected([task], advantages=plain, negative_max_turns=2)
    assert chosen.skipped == dict.fromkeys("cde", "long_negative")


def test_another_reason_of_a_long_failure_stays_the_answer() -> None:
    task = rollouts([one("a", untrainable="greedy"), one("b")], [one("c")], rewards=[0.0, 1.0])
    chosen = selected([task], advantages=objective("grpo"), negative_max_turns=1)
    assert chosen.skipped == {"a": "greedy", "b": "long_negative"}


@pytest.mark.parametrize("name", ["gigpo", "ipa"])
def test_rows_carry_the_same_advantages_however_turns_fall_into_them(name: str) -> None:
    """Five turns that continue each other, and five that were each rendered by itself."""
    found = []
    for chained in (True, False):
        groups = []
        for reward in (1.0, 0.0):
            turns: list[Turn] = []
            for k in range(5):
                parent = turns[-1] if chained and turns else None
                turns.append(turn(f"{reward}.{k}", [k], [k + 1], parent=parent))
            groups.append(turns)
        chosen = selected(
            [rollouts(*groups, rewards=[1.0, 0.0])], advantages=objective(name, gamma=0.95)
        )
        found.append(
            {
                turn_id: float(row.advantage[row.turn_index == i][0])
                for row in chosen.rows
                for i, turn_id in enumerate(row.turn_ids)
            }
        )
    assert len(found[0]) == 10
    assert found[0] == found[1]
    if name == "ipa":
        own = [found[0][f"1.0.{k}"] for k in range(5)]
        assert own == pytest.approx([0.95 ** (4 - k) for k in range(5)], rel=1e-6)
