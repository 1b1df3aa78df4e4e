"""Which agent made each call of a rollout, and in which spans: what turns are selected by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tracegrad import genai_attributes
from tracegrad.protocol import TURN_ATTRIBUTE

# Of OpenTelemetry's GenAI conventions and of OpenInference's, on an agent's span: its name.
AGENT_ATTRIBUTES = (genai_attributes.AGENT_NAME, "agent.name")


class CallLike(Protocol):
    """`events.Turn` is one."""

    @property
    def turn_id(self) -> str: ...
    @property
    def agent_name(self) -> str | None: ...
    @property
    def parent_span_id(self) -> str | None: ...


class SpanLike(Protocol):
    """`events.Span` is one; of its attributes AGENT_ATTRIBUTES and TURN_ATTRIBUTE are looked at."""

    @property
    def span_id(self) -> str: ...
    @property
    def parent_span_id(self) -> str | None: ...
    @property
    def name(self) -> str: ...
    @property
    def attributes(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class TurnScope:
    """`agent`: as the call said, else of the innermost agent's span around it, else the rollout's.
    `span_paths`: of each span around it the names from the outermost one on, with / between."""

    agent: str | None
    span_paths: tuple[str, ...] = ()


def turn_scopes(
    turns: Iterable[CallLike], spans: Iterable[SpanLike], agent: str | None
) -> dict[str, TurnScope]:
    """By the id of the turn. `spans` and `agent`: the rollout's.

    A call lies in the LLM span that reports it, where the id of its answer says so (LangChain's
    instrumentor makes no span current), else in the span that it was made from.
    """
    known = {span.span_id: span for span in spans}
    reported = {span.attributes.get(TURN_ATTRIBUTE): span.span_id for span in known.values()}
    scopes = {}
    for turn in turns:
        around = _around(reported.get(turn.turn_id, turn.parent_span_id), known)
        names = [span.name for span in reversed(around)]
        scopes[turn.turn_id] = TurnScope(
            turn.agent_name or next(filter(None, map(_agent, around)), agent),
            tuple("/".join(names[: end + 1]) for end in range(len(names))),
        )
    return scopes


def _around(span_id: str | None, known: Mapping[str, SpanLike]) -> list[SpanLike]:
    """The innermost first. Whoever sent them may have made a circle of them."""
    found: dict[str, SpanLike] = {}
    while span_id is not None and span_id in known and span_id not in found:
        found[span_id] = known[span_id]
        span_id = known[span_id].parent_span_id
    return list(found.values())


def _agent(span: SpanLike) -> str | None:
    said = (span.attributes.get(name) for name in AGENT_ATTRIBUTES)
    return next((str(name) for name in said if name), None)
