"""What the spans of a trace say of the rollout that it is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tracegrad import genai_attributes
from tracegrad.events import Outcome, RolloutFinished, RolloutStarted, Span
from tracegrad.proxy.otel.otlp import SERVICE
from tracegrad.proxy.otel.semconv import openinference
from tracegrad.proxy.otel.semconv.chat_completion import first, parsed
from tracegrad.proxy.otel.semconv.flat_attributes import STATUS_MESSAGE, events_of
from tracegrad.turn_scopes import AGENT_ATTRIBUTES

_WORKFLOW = "traceloop.workflow.name"
# What says which conversation the rollout is one exchange of: a tag, since a conversation is no
# attempt at a task.
_PROPERTIES = "traceloop.association.properties."
_TAGS = {
    "session.id": ("session.id", _PROPERTIES + "session_id"),
    genai_attributes.CONVERSATION: (genai_attributes.CONVERSATION,),
    "thread_id": ("thread_id", _PROPERTIES + "thread_id"),
}


@dataclass(slots=True)
class TraceSummary:
    """Of one trace, from all of its spans that came so far."""

    agent: str | None = None
    agent_ns: int = 0
    tags: dict[str, str] = field(default_factory=dict)

    def merge(self, agent: str | None, agent_ns: int, tags: Mapping[str, str]) -> None:
        """What one span says (`said_by`)."""
        # The outermost agent began first.
        if agent and (self.agent is None or agent_ns < self.agent_ns):
            self.agent, self.agent_ns = agent, agent_ns
        self.tags = {**tags, **self.tags}

    @staticmethod
    def said_by(span: Span) -> tuple[str | None, int, dict[str, str]]:
        """Its agent, since when, and its tags: plain values, for other workers too."""
        attributes = span.attributes
        agent = first(attributes, AGENT_ATTRIBUTES)
        metadata = parsed(attributes.get("metadata"))  # LangGraph's configuration, by OpenInference
        attributes = {**metadata, **attributes} if isinstance(metadata, Mapping) else attributes
        found = ((tag, first(attributes, names)) for tag, names in _TAGS.items())
        tags = {tag: str(value) for tag, value in found if value not in (None, "")}
        return str(agent) if agent else None, span.start_ns, tags

    def rollout_started(self, rollout_id: str, root: Span) -> RolloutStarted:
        """From the root span, which comes last."""
        attributes = root.attributes
        agent = self.agent or first(attributes, (SERVICE, _WORKFLOW))
        if agent is None and attributes.get(openinference.KIND) == "AGENT":
            agent = root.name
        return RolloutStarted(
            rollout_id=rollout_id,
            agent=str(agent) if agent else None,
            tags=dict(self.tags),
            opened_at=_by_now(root.start_ns),
        )


def rollout_finished(rollout_id: str, root: Span) -> RolloutFinished:
    """Where the root failed, the agent did. A rollout of calls that came through the proxy ended
    when it is reported; one that spans alone tell of, when they say."""
    failed = root.status == "error"
    return RolloutFinished(
        rollout_id=rollout_id,
        outcome=Outcome.AGENT_ERROR if failed else Outcome.COMPLETED,
        error=_error(root) if failed else None,
        finished_at=root.end_ns / 1e9,
        recorded_at=_by_now(root.end_ns) if rollout_id == root.trace_id else time.time(),
    )


def _by_now(ns: int) -> float:
    """Seconds, none of them to come; 0 is OTLP's word for a time that nobody said."""
    now = time.time()
    return min(ns / 1e9, now) if ns else now


def _error(root: Span) -> str | None:
    message: Any = root.attributes.get(STATUS_MESSAGE)
    if message:
        return str(message)
    exceptions = [each for name, each in events_of(root) if name == "exception"]
    last = exceptions[-1] if exceptions else {}
    words = [str(last[name]) for name in ("exception.type", "exception.message") if last.get(name)]
    return ": ".join(words) or None
