"""Which agent called, out in formats without spans and in again: turns are selected by it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.store.events import make_span, make_turn
from tracegrad.jsonutil import dump_json
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.turn_scopes import turn_scopes
from tracegrad_integrations.interchange.atif_export import trajectory_of
from tracegrad_integrations.interchange.atif_import import read_trajectory
from tracegrad_integrations.interchange.training_trace import read_trace, trace_rows

Way = Callable[[RolloutRecord], RolloutRecord]


def trajectory(record: RolloutRecord) -> Any:
    return json.loads(dump_json(trajectory_of(record, Counter())))


def by_atif(record: RolloutRecord) -> RolloutRecord:
    return read_trajectory(trajectory(record)).as_record(99.0)


def by_trace(record: RolloutRecord) -> RolloutRecord:
    [row] = trace_rows([record], Counter())
    return read_trace(json.loads(dump_json(row))).as_record(99.0)


def by_atif_of_others(record: RolloutRecord) -> RolloutRecord:
    """Passed on by somebody who knows ATIF's own fields alone."""
    return read_trajectory(without(trajectory(record), "extra")).as_record(99.0)


def by_trace_of_others(record: RolloutRecord) -> RolloutRecord:
    [row] = trace_rows([record], Counter())
    return read_trace(without(json.loads(dump_json(row)), "tracegrad")).as_record(99.0)


def without(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: without(each, key) for name, each in value.items() if name != key}
    return [without(each, key) for each in value] if isinstance(value, list) else value


NAMES, STEPS = st.sampled_from(["planner", "writer", "checker"]), st.integers(1, 3)
PLAN = make_turn("plan", new=[1])
TEAM = [
    PLAN,
    make_turn("write", new=[2], agent_name="writer"),
    make_turn("go-on", parent=PLAN),
    make_turn("check", new=[3], parent_span_id=f"{2:016x}"),
    make_turn("plan-more", new=[4], parent_span_id=f"{1:016x}"),
]
RECORD = RolloutRecord(
    rollout_id="r",
    opened_at=1.0,
    agent="planner",
    spans=[
        make_span(1, "r", attributes={"gen_ai.agent.name": "planner"}),
        make_span(2, "r", parent_span_id=f"{1:016x}", attributes={"agent.name": "checker"}),
    ],
    turns=TEAM,
)
WAYS = [by_atif, by_trace, by_atif_of_others, by_trace_of_others]


def agents(record: RolloutRecord) -> dict[int, str | None]:
    """By the first token of the prompt, which every way keeps, and no two paths share."""
    scopes = turn_scopes(record.turns, record.spans, record.agent)
    return {turn.prompt_token_ids[0]: scopes[turn.turn_id].agent for turn in record.turns}


@pytest.mark.parametrize("way", WAYS)
def test_a_turn_stays_its_agents(way: Way) -> None:
    assert agents(RECORD) == {1: "planner", 2: "writer", 3: "checker", 4: "planner"}
    back = way(RECORD)
    assert (back.agent, len(back.spans), len(back.turns)) == ("planner", 0, len(TEAM))
    assert agents(back) == agents(RECORD)
    # Said of the others alone: the rollout says whose they are.
    assert Counter(turn.agent_name for turn in back.turns) == {None: 3, "writer": 1, "checker": 1}


def test_each_trajectory_has_the_name_of_its_turns_agent() -> None:
    made = trajectory(RECORD)
    assert made["agent"]["name"] == "planner"
    embedded = made["subagent_trajectories"]
    assert [each["agent"]["name"] for each in embedded] == ["writer", "checker", "planner"]


def written_by(name: str, steps: int, embedded: list[Any]) -> Any:
    """A trajectory whose agent says its own name in each step."""
    said = [{"step_id": n + 2, "source": "agent", "message": name} for n in range(steps)]
    return {
        "schema_version": "ATIF-v1.7",
        "agent": {"name": name, "version": "1"},
        "steps": [{"step_id": 1, "source": "user", "message": "Who?"}, *said],
        "subagent_trajectories": embedded,
    }


TRAJECTORIES = st.recursive(
    st.builds(written_by, NAMES, STEPS, st.just([])),
    lambda inner: st.builds(written_by, NAMES, STEPS, st.lists(inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(TRAJECTORIES)
def test_turns_of_embedded_trajectories_are_their_agents_out_and_in(value: Any) -> None:
    record = read_trajectory(value).as_record(99.0)
    for back in (record, by_atif(record), by_atif_of_others(record)):
        scopes = turn_scopes(back.turns, back.spans, back.agent)
        assert len(back.turns) == len(record.turns)
        for turn in back.turns:
            assert turn.response is not None
            said = turn.response["choices"][0]["message"]["content"]
            assert scopes[turn.turn_id].agent == said


def test_the_longest_conversation_may_be_another_agents() -> None:
    plan = make_turn("plan", new=[1], agent_name="planner")
    more = make_turn("go-on", parent=plan, agent_name="planner")
    write = make_turn("write", new=[2])
    record = RolloutRecord(rollout_id="r", opened_at=1.0, agent="writer", turns=[plan, more, write])
    back = by_atif_of_others(record)
    assert agents(back) == agents(record) == {1: "planner", 2: "writer"}


def test_of_several_agents_in_one_conversation_each_step_says_its_own() -> None:
    handed = make_turn("go-on", parent=PLAN, agent_name="writer")
    record = RolloutRecord(rollout_id="r", opened_at=1.0, agent="planner", turns=[PLAN, handed])
    assert trajectory(record)["agent"]["name"] == "planner"
    assert [turn.agent_name for turn in by_atif(record).turns] == [None, "writer"]
