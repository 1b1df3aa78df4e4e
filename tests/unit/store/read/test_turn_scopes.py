"""Scopes of stored turns are those of the turns and spans as they were captured."""

from __future__ import annotations

from support.store.events import make_span, make_turn
from tracegrad.events import RolloutStarted
from tracegrad.protocol import TURN_ATTRIBUTE
from tracegrad.store import Store
from tracegrad.turn_scopes import TurnScope, turn_scopes

TRACE = "a" * 32


def test_they_are_read_by_rollout(store: Store) -> None:
    names = {"gen_ai.agent.name": "planner", "long": "x" * 10_000, "agent.name": 'a "quoted" one'}
    spans = [
        make_span(1, "r1", trace_id=TRACE, name="solve"),
        make_span(2, "r1", trace_id=TRACE, parent_span_id=f"{1:016x}", attributes=names),
        make_span(
            3,
            "r1",
            trace_id=TRACE,
            parent_span_id=f"{2:016x}",
            attributes={TURN_ATTRIBUTE: "t2", "agent.name": ""},
        ),
    ]
    turns = [
        make_turn("t1", "r1", parent_span_id=f"{1:016x}"),
        make_turn("t2", "r1", parent_span_id=f"{1:016x}"),
        make_turn("t3", "r1", parent_span_id=f"{2:016x}", agent_name="grün"),
    ]
    opened = RolloutStarted(rollout_id="r1", agent="whole")
    store.append([opened, *spans, *turns, make_turn("t4", "r2")])
    found = store.turn_scopes(["r1", "r2", "gone"])
    assert found == turn_scopes(turns, spans, "whole") | {"t4": TurnScope(None)}
    assert found["t1"] == TurnScope("whole", ("solve",))
    assert found["t2"] == TurnScope("planner", ("solve", "solve/s2", "solve/s2/s3"))
    assert found["t3"].agent == "grün"
    assert store.rollout_turns("r1")[2].agent_name == "grün"
