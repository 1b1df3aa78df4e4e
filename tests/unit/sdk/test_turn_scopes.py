"""Which agent made a call, and which spans it lies in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from support.store.events import make_span
from tracegrad.protocol import TURN_ATTRIBUTE
from tracegrad.turn_scopes import TurnScope, turn_scopes


@dataclass(frozen=True)
class Call:
    turn_id: str = "t"
    agent_name: str | None = None
    parent_span_id: str | None = f"{3:016x}"


def span(number: int, name: str, parent: int | None, **attributes: Any) -> Any:
    outer = None if parent is None else f"{parent:016x}"
    return make_span(number, name=name, parent_span_id=outer, attributes=attributes)


AGENT = partial(span, 2, "writer", 1)
AROUND = [span(1, "solve", None), AGENT(**{"agent.name": "pen"}), span(3, "llm", 2)]
PATHS = ("solve", "solve/writer", "solve/writer/llm")


@pytest.mark.parametrize(
    ("call", "spans", "scope"),
    [
        (Call(), AROUND, TurnScope("pen", PATHS)),
        (Call(agent_name="own"), AROUND, TurnScope("own", PATHS)),
        (Call(), [*AROUND[:1], AGENT(**{"gen_ai.agent.name": "a", "agent.name": "b"})], None),
        (Call(), [AROUND[0], AGENT(), AROUND[2]], TurnScope("whole", PATHS)),
        (Call(parent_span_id=None), AROUND, TurnScope("whole")),
        (Call(parent_span_id="beef" * 4), AROUND, TurnScope("whole")),
        (Call(), AROUND[1:], TurnScope("pen", ("writer", "writer/llm"))),
    ],
)
def test_what_a_call_lies_in(call: Call, spans: list[Any], scope: TurnScope | None) -> None:
    # Without its own span a call lies in nothing, whatever else there is.
    assert turn_scopes([call], spans, "whole") == {"t": scope or TurnScope("whole")}


def test_the_innermost_agent_counts() -> None:
    spans = [span(1, "outer", None, **{"agent.name": "a"}), AGENT(**{"agent.name": "b"})]
    found = turn_scopes([Call(parent_span_id=f"{n:016x}") for n in (2,)], spans, None)
    assert found["t"].agent == "b"


def test_a_call_lies_in_the_span_that_reports_it() -> None:
    """As of LangChain: its spans are never the current ones, so that a call is made from ours."""
    reported = [span(4, "node", 1), span(5, "ChatOpenAI", 4, **{TURN_ATTRIBUTE: "t"})]
    call = Call(parent_span_id=f"{1:016x}")
    found = turn_scopes([call], [AROUND[0], *reported], None)["t"]
    assert found.span_paths == ("solve", "solve/node", "solve/node/ChatOpenAI")


def test_spans_in_a_circle_end() -> None:
    circle = [span(3, "a", 4), span(4, "b", 3)]
    assert turn_scopes([Call()], circle, None) == {"t": TurnScope(None, ("b", "b/a"))}
