"""Every second of a rollout belongs to one stage, whatever ran beside what."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracegrad.events import CALL_STAGES
from tracegrad.inspect.rollout_time import STAGES, RolloutTime, stage_statistics, time_of
from tracegrad.store.read.rollout_moments import RolloutMoments, TurnMoment

SECONDS = st.floats(0, 50, allow_nan=False).map(lambda value: round(value, 6))
MOMENTS = st.floats(0, 300, allow_nan=False)
TIMINGS = st.none() | st.dictionaries(st.sampled_from(CALL_STAGES), SECONDS)


@st.composite
def rollouts(draw: st.DrawFn) -> RolloutMoments:
    """With calls in any order, at once or not, some of them not timed, and moments that
    contradict each other, as clocks do."""
    calls = draw(st.lists(st.tuples(MOMENTS, TIMINGS, st.booleans()), max_size=8))
    commits = draw(st.dictionaries(st.sampled_from("01234567"), SECONDS))
    turns = [
        TurnMoment(str(index), at, None if timing is None else {**timing, "commits": commits}, span)
        for index, (at, timing, span) in enumerate(calls)
    ]
    maybe = st.none() | MOMENTS
    return RolloutMoments(
        rollout_id="r",
        opened_at=draw(MOMENTS),
        finished_at=draw(maybe),
        rewarded_at=draw(maybe),
        leased_at=draw(maybe),
        consumed_at=draw(maybe),
        turns=turns,
        tools=draw(st.lists(st.tuples(MOMENTS, MOMENTS), max_size=4)),
    )


@settings(deadline=None)
@given(rollouts())
def test_the_parts_sum_up_to_the_whole(moments: RolloutMoments) -> None:
    found = time_of(moments)
    assert math.fsum(found.stages.values()) == pytest.approx(found.whole_s, abs=1e-6)
    assert all(seconds >= 0 for seconds in found.stages.values())
    assert set(found.stages) <= set(STAGES)


@settings(deadline=None)
@given(rollouts())
def test_calls_have_the_union_of_their_intervals(moments: RolloutMoments) -> None:
    """Swept by another way: intervals in order, and how far those before reach."""
    found = time_of(moments)
    covered, until = 0.0, -1.0
    for begin, end in sorted((turn.begins_s, turn.ends_s) for turn in found.turns):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    of_calls = {"proxy", "commit"} | set(CALL_STAGES) - {"prepare", "encode", "finish"}
    seconds = math.fsum(found.stages.get(stage, 0.0) for stage in of_calls)
    assert seconds == pytest.approx(covered, abs=1e-6)
    alone = math.fsum(turn.ends_s - turn.begins_s for turn in found.turns)
    assert found.overlap_s == pytest.approx(alone - covered, abs=1e-6)


def one(*turns: TurnMoment, **moments: float) -> RolloutTime:
    return time_of(RolloutMoments(rollout_id="r", **{"opened_at": 100.0} | moments, turns=turns))


def seconds_of(found: RolloutTime) -> dict[str, float]:
    return {stage: round(seconds, 6) for stage, seconds in found.stages.items()}


def test_a_rollout_from_its_opening_to_its_step() -> None:
    found = one(
        TurnMoment("a", 104.0, {"prepare": 0.1, "prefill": 0.4, "decode": 1.0, "finish": 0.5}),
        TurnMoment("b", 110.0, {"gate": 1.0, "queue": 2.0, "decode": 1.0, "commits": {"a": 0.25}}),
        rewarded_at=112.0,
        finished_at=113.0,
        leased_at=120.0,
        consumed_at=150.0,
    )
    assert seconds_of(found) == {
        "setup": 2.0,
        "proxy": 0.6,
        "gate": 1.0,
        "queue": 2.0,
        "prefill": 0.4,
        "decode": 2.0,
        "commit": 0.25,
        "between": 2.75,  # of which 1 between the reward and the end
        "reward": 2.0,
        "waiting": 7.0,
        "training": 30.0,
    }
    assert found.whole_s == pytest.approx(50.0)
    assert found.turns[0].commit_is_known
    assert not found.turns[1].commit_is_known


def test_the_runners_sandbox_and_reward_are_told_apart() -> None:
    found = one(
        TurnMoment("a", 107.0, {"decode": 2.0}),
        sandbox_until=103.0,
        scored_from=110.0,
        rewarded_at=112.0,
        finished_at=112.0,
    )
    assert seconds_of(found) == {
        "sandbox": 3.0,
        "setup": 2.0,
        "decode": 2.0,
        "between": 3.0,  # the agent's, after its last call
        "reward": 2.0,
    }


def test_tools_are_told_from_the_agent_where_spans_tell_of_them() -> None:
    found = time_of(
        RolloutMoments(
            rollout_id="r",
            opened_at=100.0,
            turns=[
                TurnMoment("a", 102.0, {"decode": 1.0}),
                TurnMoment("b", 110.0, {"decode": 2.0}),
            ],
            finished_at=113.0,
            # Two at once, one of them while the next call is made already; one after the last.
            tools=[(103.0, 105.0), (104.0, 109.0), (110.5, 111.0)],
        )
    )
    assert seconds_of(found) == {
        "setup": 1.0,
        "decode": 3.0,
        "tools": 5.5,
        "between": 3.5,
    }


def test_calls_at_once_share_their_moments() -> None:
    found = one(
        TurnMoment("a", 104.0, {"decode": 4.0}),
        TurnMoment("b", 104.0, {"prefill": 2.0}),
        TurnMoment("c", 104.0, {"decode": 1.0}),
    )
    assert seconds_of(found) == {
        "setup": 0.0,
        "prefill": round(1 / 2 + 1 / 3, 6),
        "decode": round(2 + 1 / 2 + 2 / 3, 6),
        "between": 0.0,
    }
    assert found.overlap_s == pytest.approx(3.0)


def test_what_was_not_measured_is_unknown() -> None:
    found = one(
        TurnMoment("old", 105.0, None),
        TurnMoment("new", 109.0, {"decode": 1.0}),
        TurnMoment("span", 110.0, None, from_span=True),
        finished_at=112.0,
    )
    # An old call ended at 105, one of a span began at 110: how long each took nobody knows.
    assert seconds_of(found) == {"decode": 1.0, "between": 4.0, "unknown": 7.0}
    assert [turn.is_known for turn in found.turns] == [False, True, False]


def test_a_copy_without_leases_does_not_tell_the_wait_from_the_step() -> None:
    found = one(TurnMoment("a", 101.0, {"decode": 1.0}), finished_at=102.0, consumed_at=110.0)
    assert seconds_of(found) == {"decode": 1.0, "between": 1.0, "unknown": 8.0}


def test_a_rollout_without_calls() -> None:
    assert seconds_of(one(rewarded_at=103.0, finished_at=104.0)) == {
        "between": 1.0,
        "reward": 3.0,
    }
    assert one().whole_s == 0.0


def test_means_are_of_those_that_have_the_stage() -> None:
    times = [
        one(TurnMoment("a", 100.0 + n, {"gate": 0.0, "decode": float(n)})) for n in range(1, 21)
    ]
    times.append(one(TurnMoment("a", 130.0, None)))
    found = {row.stage: row for row in stage_statistics(times)}
    assert found["decode"] == ("decode", pytest.approx(210 / 240), 10.5, 19.0, 20)
    assert found["gate"] == ("gate", 0.0, 0.0, 0.0, 20)
    assert found["unknown"] == ("unknown", pytest.approx(30 / 240), 30.0, 30.0, 1)
