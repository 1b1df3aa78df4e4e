"""The weighted sum in closed forms, and that it does not depend on the order of arrival."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tracegrad.events import Reward
from tracegrad.store import Scoring
from tracegrad_trainer.rewards.compose import (
    Composition,
    compose,
    composed_event,
    latest_parts,
)
from tracegrad_trainer.rewards.config import RewardSettings


def settings(**given: Any) -> RewardSettings:
    return RewardSettings.model_validate(given)


def part(value: float | None, name: str = "reward", **more: Any) -> Reward:
    return Reward(rollout_id="r", value=value, name=name, **more)


def scoring(scorer: str, **parts: float | None) -> Scoring:
    return Scoring(
        rollout_id="r", scorer=scorer, digest="", turns=1, round=0, state="scored", parts=parts
    )


def test_the_sum_is_of_the_parts_times_their_weights() -> None:
    made = compose(
        settings(weights={"resolved": 1.0, "brief": -0.5, "unused": 0.0}),
        {"resolved": 0.75, "brief": 0.5, "other": 9.0},
    )
    assert made.value == 0.5
    assert made.describe() == "brief 0.5 x -0.5 + resolved 0.75 x 1"


def test_parts_and_the_sum_are_clamped() -> None:
    made = compose(
        settings(weights={"a": 2.0, "b": 1.0}, clamp_parts={"a": [-1, 1]}, clamp=[-1.5, 1.5]),
        {"a": 7.0, "b": -0.25},
    )
    assert made.value == 1.5, "2 x 1 - 0.25 = 1.75"
    assert made.describe() == "a 1 (given 7) x 2 + b -0.25 x 1; clamped from 1.75"


def test_a_part_that_is_unknown_leaves_the_sum_unknown() -> None:
    both = settings(weights={"a": 1, "b": 1})
    assert compose(both, {"a": 1.0}) == Composition(None, why="unknown: b")
    without_b = settings(weights={"a": 1, "b": 1}, optional=["b"])
    assert compose(without_b, {"a": 1.0}).value == 1.0
    assert compose(without_b, {"b": 1.0}).why == "unknown: a"
    neither = settings(weights={"a": 1, "b": 1}, optional=["a", "b"])
    assert compose(neither, {}).value is None, "absence is not 0"


def test_terms_alone_are_no_reward_where_there_is_something_else() -> None:
    given: dict[str, Any] = {"length": {"target_tokens": 5}, "weights": {"length": -0.1, "a": 1}}
    assert compose(settings(**given, optional=["a"]), {"length": 0.5}).why == "unknown: a"
    del given["weights"]["a"]
    assert compose(settings(**given), {"length": 0.5}).value == -0.05


def test_without_weights_all_that_scorers_gave_counts_once() -> None:
    wanted = settings(functions=["m:a", "m:b"])
    both = {"a": scoring("a", a=0.5), "b": scoring("b", x=1.0, y=2.0)}
    assert compose(wanted, {"a": 0.5, "x": 1.0, "y": 2.0, "z": 9}, both).value == 3.5
    silent = both | {"b": scoring("b")}
    assert compose(wanted, {"a": 0.5}, silent).why == "unknown: b"


def test_a_sum_beyond_all_bounds_is_unknown_and_says_what_helps() -> None:
    made = compose(settings(weights={"a": 1e6}), {"a": 1e6})
    assert made == Composition(None, why="the sum is 1e+12: set rewards.clamp")
    assert compose(settings(weights={"a": 1e6}, clamp=[0, 1]), {"a": 1e6}).value == 1.0


def test_of_each_name_what_arrived_last_counts() -> None:
    arrived = [
        part(1.0, "a"), part(0.5, "a"), part(1.0, "b"), part(None, "b"), part(3.0, "c", turn=0),
        part(1.0), part(7.0, source="composed"), part(-1.0, source="rule"),
    ]  # fmt: skip
    assert latest_parts(arrived) == {"a": 0.5, "reward": 1.0}


VALUES = st.none() | st.floats(-1e6, 1e6, allow_subnormal=False)
EVENTS = st.lists(st.tuples(st.sampled_from("abc"), VALUES), max_size=12)


@given(events=EVENTS, seed=st.integers(0, 2**32), optional=st.sets(st.sampled_from("abc")))
def test_any_order_of_arrival_gives_the_same_reward(
    events: list[tuple[str, float | None]], seed: int, optional: set[str]
) -> None:
    """Of events of different names: of one name the last one counts, which is what last means."""
    wanted = settings(weights={"a": 1.0, "b": -0.1, "c": 1e-3}, optional=sorted(optional))
    in_order = [part(value, name) for name, value in events]
    expected = compose(wanted, latest_parts(in_order))
    lanes = {name: [each for each in in_order if each.name == name] for name in "abc"}
    draw, shuffled = random.Random(seed), list[Reward]()
    while any(lanes.values()):
        shuffled.append(lanes[draw.choice([n for n, lane in lanes.items() if lane])].pop(0))
    # As a worker does that looks after every event: sums come between the parts.
    arrived: list[Reward] = []
    for event in shuffled:
        arrived.append(event)
        new = composed_event("r", compose(wanted, latest_parts(arrived)), arrived)
        arrived += [new] if new else []
    sums = [each.value for each in arrived if each.source == "composed"]
    assert (sums[-1] if sums else None) == expected.value
    ids = [each.reward_id for each in arrived]
    assert len(ids) == len(set(ids)), "each sum is an event of its own"


def test_a_sum_is_written_once_and_taken_back_once() -> None:
    known, unknown = Composition(1.0), Composition(None, why="unknown: a")
    assert composed_event("r", unknown, []) is None, "nothing is there to be taken back"
    first = composed_event("r", known, [])
    assert first is not None
    assert composed_event("r", known, [first]) is None
    again = composed_event("r", known, [])
    assert again is not None
    assert again.reward_id == first.reward_id, "two workers, one event"
    back = composed_event("r", unknown, [first])
    assert back is not None
    assert (back.value, back.comment) == (None, "unknown: a")
    assert composed_event("r", Composition(None, why="unknown: b"), [first, back]) is None
    third = composed_event("r", known, [first, back])
    assert third is not None
    assert third.reward_id not in (first.reward_id, back.reward_id)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"functions": ["m:a", "n:a"]}, "two functions are named 'a'"),
        ({"functions": {"a": "m:a"}, "commands": {"a": "true"}}, "two scorers are named 'a'"),
        ({"commands": {"length": "x"}, "length": {"target_tokens": 1},
          "weights": {"length": 1}}, "two scorers are named 'length'"),
        ({"functions": {"reward": "m:a"}}, "'reward' is no name for a scorer"),
        ({"functions": ["resolved"]}, "'resolved': write package.module:function"),
        ({"weights": {"a": 1}, "clamp": [1, 0]}, r"rewards.clamp: \[1, 0\] has its highest first"),
        ({"weights": {"a": 1}, "clamp_parts": {"a": [1, 0]}}, "clamp_parts.a: .* highest first"),
        ({"weights": {"a": float("nan")}}, "finite number"),
        ({"weights": {"a": 0}}, "rewards.weights: all are 0"),
        ({"length": {"target_tokens": 5}}, "rewards.length has no weight"),
        ({"weights": {"a": 1}, "optional": ["b"]}, "rewards.optional: 'b' has no weight"),
        ({"clamp": [0, 1]}, "rewards.clamp: there is no sum"),
        ({"optional": ["b"]}, "rewards.optional: there is no sum"),
        ({"format": {"pattern": "("}, "weights": {"format": 1}}, "is no regular expression"),
        ({"judge": {"url": "example.org", "model": "m", "rubric": "r"}}, "is no base URL"),
    ],
)  # fmt: skip
def test_a_wrong_composition_is_one_clear_error(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said) as error:
        settings(**given)
    assert error.value.error_count() == 1


def test_a_weight_of_a_part_that_no_scorer_gives_is_fine() -> None:
    assert settings(weights={"thumbs": 1.0}).composes
    assert not settings(agent_error=0.0).composes
