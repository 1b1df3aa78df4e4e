"""IPA's schedule of anchors: never past the ends, only backwards, within its budget."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracegrad.store.anchors.schedule import (
    AnchorSettings,
    AnchorState,
    is_mastered,
    observe,
    plan,
    start_at_last_turn,
    with_new_demonstration,
)

ROLLBACK = AnchorSettings(mode="rollback", window=4, threshold=0.75)
PARALLEL = AnchorSettings(mode="parallel", window=4, threshold=0.75, at_once=2)

modes: st.SearchStrategy[Literal["rollback", "parallel"]] = st.sampled_from(
    ["rollback", "parallel"]
)
settings_of = st.builds(
    AnchorSettings,
    mode=modes,
    threshold=st.floats(0.1, 1),
    window=st.integers(1, 8),
    at_once=st.integers(1, 6),
    seed=st.integers(0, 5),
)
# What came of each round's rollouts: as many as there are, taken in turn.
luck = st.lists(st.booleans(), min_size=1, max_size=60)


def test_rollback_begins_at_the_experts_last_turn_and_moves_back_when_it_is_mastered() -> None:
    state = start_at_last_turn(3)
    quotas, state = plan(state, 8, ROLLBACK)
    assert quotas == {2: 8}
    state = observe(state, 2, [True, True, True], ROLLBACK)
    assert state.at == 2  # the window is not full
    state = observe(state, 2, [False], ROLLBACK)
    assert state.at == 1  # three of four
    assert state.rate(1) is None
    assert plan(state, 5, ROLLBACK)[0] == {1: 5}


def test_rollback_counts_only_the_latest_rollouts_of_where_it_stands() -> None:
    state = observe(start_at_last_turn(3), 2, [False] * 10, ROLLBACK)
    assert observe(state, 2, [True, True], ROLLBACK).at == 2
    assert observe(state, 2, [True, True, True], ROLLBACK).at == 1
    late = observe(state, 1, [True] * 4, ROLLBACK)  # from elsewhere: it says nothing of 2
    assert late == state


def test_rollback_stays_at_the_beginning_once_it_is_there() -> None:
    state = start_at_last_turn(1)
    assert not is_mastered(state, 0, ROLLBACK)
    state = observe(state, 0, [True] * 4, ROLLBACK)
    assert state.at == 0
    assert is_mastered(state, 0, ROLLBACK)


def test_parallel_draws_several_anchors_and_leaves_out_those_that_are_mastered() -> None:
    state = start_at_last_turn(4)
    for anchor in (1, 2):
        state = observe(state, anchor, [True] * 4, PARALLEL)
    for _ in range(10):
        quotas, state = plan(state, 5, PARALLEL)
        assert set(quotas) == {0, 3}
        assert sorted(quotas.values()) == [2, 3]


def test_parallel_fills_up_with_mastered_anchors_where_too_few_are_left() -> None:
    state = start_at_last_turn(2)
    state = observe(state, 1, [True] * 4, PARALLEL)
    assert set(plan(state, 4, PARALLEL)[0]) == {0, 1}


def test_parallel_sees_every_anchor_about_as_often() -> None:
    state, drawn = start_at_last_turn(6), [0] * 6
    for _ in range(600):
        quotas, state = plan(state, 2, PARALLEL, task="a")
        for anchor, count in quotas.items():
            drawn[anchor] += count
    assert all(150 < count < 250 for count in drawn)


@given(settings_of, st.integers(1, 7), st.integers(1, 20), luck)
def test_plans_keep_their_budget_and_anchors_stay_within_the_experts_turns(
    settings: AnchorSettings, turns: int, budget: int, results: list[bool]
) -> None:
    state = start_at_last_turn(turns)
    place = 0
    for _ in range(6):
        quotas, after = plan(state, budget, settings, task="t")
        assert sum(quotas.values()) == budget
        assert all(0 <= anchor < turns and count > 0 for anchor, count in quotas.items())
        most = 1 if settings.mode == "rollback" else min(settings.at_once, turns, budget)
        assert len(quotas) == most
        assert max(quotas.values()) - min(quotas.values()) <= 1
        state = after
        for anchor, count in quotas.items():
            came = [results[(place + i) % len(results)] for i in range(count)]
            place += count
            before = state.at
            state = observe(state, anchor, came, settings)
            assert before - 1 <= state.at <= before
            assert state.at >= 0
            assert all(len(each) <= settings.window for each in state.results.values())


@given(settings_of, luck)
def test_a_schedule_that_goes_on_from_json_plans_what_it_would_have_planned(
    settings: AnchorSettings, results: list[bool]
) -> None:
    def round_of(state: AnchorState, came: bool) -> AnchorState:
        quotas, state = plan(state, 4, settings, task="a")
        for anchor, count in quotas.items():
            state = observe(state, anchor, [came] * count, settings)
        return state

    one = start_at_last_turn(5)
    for came in results[:5]:
        one = round_of(one, came)
    other = msgspec.json.decode(msgspec.json.encode(one), type=AnchorState)
    assert other == one
    for came in results[:4]:
        one, other = round_of(one, came), round_of(other, came)
        assert plan(one, 7, settings, task="a") == plan(other, 7, settings, task="a")


def test_a_new_expert_keeps_how_far_from_the_end_the_anchor_stood() -> None:
    state = observe(start_at_last_turn(6), 5, [True] * 4, ROLLBACK)
    state = observe(state, 4, [True], ROLLBACK)
    assert state.at == 4
    shorter = with_new_demonstration(state, 4)
    assert (shorter.at, shorter.turns, shorter.results) == (2, 4, {})
    assert with_new_demonstration(state, 1).at == 0
    assert with_new_demonstration(state, 9).at == 7


def test_seeds_and_tasks_draw_apart_and_equal_ones_alike() -> None:
    def drawn(seed: int, task: str) -> list[list[int]]:
        settings = PARALLEL.model_copy(update={"seed": seed})
        state, found = start_at_last_turn(8), []
        for _ in range(10):
            quotas, state = plan(state, 2, settings, task=task)
            found.append(sorted(quotas))
        return found

    assert drawn(0, "a") == drawn(0, "a")
    assert drawn(0, "a") != drawn(1, "a")
    assert drawn(0, "a") != drawn(0, "b")


def test_what_makes_no_sense_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="turns: 0"):
        start_at_last_turn(0)
    with pytest.raises(ValueError, match="budget: 0"):
        plan(start_at_last_turn(2), 0, ROLLBACK)
    with pytest.raises(ValueError, match="anchor: 2; the demonstration has turns 0 to 1"):
        observe(start_at_last_turn(2), 2, [True], ROLLBACK)
    with pytest.raises(ValueError, match="turns: 0"):
        with_new_demonstration(start_at_last_turn(2), 0)


def test_rollback_goes_over_later_anchors_again_where_that_is_asked() -> None:
    settings = AnchorSettings(mode="rollback", window=4, threshold=0.75, review=0.5)
    state = start_at_last_turn(4)
    assert plan(state, 8, settings)[0] == {3: 8}  # nothing is mastered yet
    for anchor in (3, 2):
        state = observe(state, anchor, [True] * 4, settings)
    seen = set()
    for _ in range(20):
        quotas, state = plan(state, 8, settings)
        assert quotas.pop(1) == 4
        [(later, count)] = quotas.items()
        assert count == 4
        seen.add(later)
    assert seen == {2, 3}
    assert observe(state, 3, [False] * 9, settings) == state  # what is gone over moves nothing
