"""A stored rollout as a trace of OpenTelemetry's, for servers that show traces.

One span for the rollout, one for each LLM call, and the spans that the agent sent itself, in one
trace. Calls stand in the span that they were made in, where that is known. Rewards are events of
evaluation. Ids are made of ours, so that sending a rollout again makes no second one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from tracegrad import genai_attributes
from tracegrad.events import CALL_STAGES, Json, Outcome, Reward, Turn
from tracegrad.events import Span as StoredSpan
from tracegrad.jsonutil import dump_json
from tracegrad.protocol import ROLLOUT_ATTRIBUTE
from tracegrad.proxy.dialects.history import FindsTurn, recorded_call, recorded_reply
from tracegrad.proxy.otel.semconv import opentelemetry
from tracegrad.proxy.otel.semconv.chat_completion import LlmCall, usage_of
from tracegrad.proxy.otel.semconv.evaluations import result_attributes
from tracegrad.proxy.otel.semconv.flat_attributes import EVENTS, STATUS_MESSAGE
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.store.read.training_samples import agent_turn_indices, turn_of_reward

_SCOPE = InstrumentationScope("tracegrad")
_NS = 1_000_000_000
_INT64 = 1 << 63
_STATUS = {"ok": StatusCode.OK, "error": StatusCode.ERROR}


def rollout_spans(copy: RolloutRecord) -> list[ReadableSpan]:
    """The rollout's own comes first."""
    return _Trace(copy).spans()


def rewards_of_no_turn(copy: RolloutRecord) -> int:
    """How many are for turns that are not there: no span has them."""
    known = agent_turn_indices(copy.turns)
    given = (each for each in copy.rewards if each.value is not None and each.turn is not None)
    return sum(turn_of_reward(each, known) is None for each in given)


class _Trace:
    def __init__(self, copy: RolloutRecord) -> None:
        self._copy = copy
        self._sent = {span.span_id: span for span in copy.spans}
        self._counted = agent_turn_indices(copy.turns)
        # In the agent's own trace, if there is one: its ids are found in its logs.
        traces = [span.trace_id for span in copy.spans]
        self._trace_id = int(traces[0], 16) if traces else _number("trace", copy.rollout_id, 16)
        self._root = _number("rollout", copy.rollout_id, 8)
        self._resource = Resource({"service.name": copy.agent or "tracegrad"})

    def spans(self) -> list[ReadableSpan]:
        by_id = {turn.turn_id: turn for turn in self._copy.turns}
        calls = [
            self._call(number, turn, by_id.get)
            for number, turn in enumerate(self._copy.turns)
            if not self._is_a_span(turn)
        ]
        sent = [self._sent_span(span) for span in self._copy.spans]
        return [self._rollout(calls, sent), *calls, *sent]

    def _is_a_span(self, turn: Turn) -> bool:
        """Its call came as a span, which says all of it."""
        return turn.dialect == "otel" and turn.parent_span_id in self._sent

    def _rollout(self, calls: Sequence[ReadableSpan], sent: Sequence[ReadableSpan]) -> ReadableSpan:
        """Servers show it for the whole: what was first asked, and what was last answered."""
        copy = self._copy
        inner = [*calls, *sent]
        agent = copy.agent or "agent"
        attributes: Json = {
            genai_attributes.OPERATION: opentelemetry.INVOKE_AGENT,
            genai_attributes.AGENT_NAME: copy.agent,
            genai_attributes.CONVERSATION: copy.rollout_id,
            ROLLOUT_ATTRIBUTE: copy.rollout_id,
            "tracegrad.task_id": copy.task_id,
            "tracegrad.task": copy.task,
            "tracegrad.outcome": copy.outcome,
            "tracegrad.reward": copy.reward,
            genai_attributes.INPUT: (calls[0].attributes or {}).get(genai_attributes.INPUT)
            if calls
            else None,
            genai_attributes.OUTPUT: (calls[-1].attributes or {}).get(genai_attributes.OUTPUT)
            if calls
            else None,
            **{f"tracegrad.tag.{name}": value for name, value in copy.tags.items()},
        }
        starts = [span.start_time for span in inner if span.start_time]
        ends = [span.end_time for span in inner if span.end_time]
        start = min([round(copy.opened_at * _NS), *starts])
        failed = copy.outcome is not None and copy.outcome != Outcome.COMPLETED.value
        return self._span(
            f"{opentelemetry.INVOKE_AGENT} {agent}",
            self._root,
            None,
            (start, max([start, round((copy.finished_at or 0) * _NS), *ends])),
            attributes,
            events=list(self._rewards(None)),
            status=Status(StatusCode.ERROR, copy.error or copy.outcome) if failed else None,
        )

    def _call(self, number: int, turn: Turn, find: FindsTurn) -> ReadableSpan:
        parent = turn.parent_span_id
        end = round(turn.created_at * _NS)
        seconds = sum((turn.timing or {}).get(stage) or 0 for stage in CALL_STAGES)
        attributes = {
            **opentelemetry.write(_call_of(turn, find)),
            genai_attributes.AGENT_NAME: turn.agent_name,
            genai_attributes.CONVERSATION: self._copy.rollout_id,
            ROLLOUT_ATTRIBUTE: self._copy.rollout_id,
            "tracegrad.turn_id": turn.turn_id,
            "tracegrad.parent_turn_id": turn.parent_id,
            "tracegrad.policy_versions": turn.policy_versions or None,
            "tracegrad.untrainable": turn.untrainable,
        }
        return self._span(
            f"{opentelemetry.CHAT} {turn.asked_model or turn.model}".rstrip(),
            _number("turn", turn.turn_id, 8),
            int(parent, 16) if parent in self._sent and parent else self._root,
            (end - round(seconds * _NS), end),
            attributes,
            kind=SpanKind.CLIENT,
            events=list(self._rewards(number)),
        )

    def _sent_span(self, span: StoredSpan) -> ReadableSpan:
        """What the agent sent, in this trace: below the rollout, where its parent is not here."""
        attributes = dict(span.attributes)
        events = [
            Event(str(each.get("name")), _plain(each.get("attributes")), each.get("time_ns"))
            for each in attributes.pop(EVENTS, ())
            if isinstance(each, Mapping)
        ]
        message = attributes.pop(STATUS_MESSAGE, None)
        code = _STATUS.get(span.status, StatusCode.UNSET)
        inner = span.parent_span_id in self._sent and span.parent_span_id
        return self._span(
            span.name,
            int(span.span_id, 16),
            int(span.parent_span_id or "", 16) if inner else self._root,
            (span.start_ns, span.end_ns),
            attributes,
            kind=getattr(SpanKind, span.kind.upper(), SpanKind.INTERNAL),
            events=events,
            status=Status(code, str(message) if message and code == StatusCode.ERROR else None),
        )

    def _rewards(self, place: int | None) -> Iterator[Event]:
        """Of the turn at `place`; None: of the whole rollout. Those of turns that are not there are
        nobody's."""
        for reward in self._copy.rewards:
            if reward.value is not None and self._is_for(reward, place):
                given = result_attributes(reward.name, reward.value, reward.label, reward.comment)
                source = {"tracegrad.reward.source": reward.source}
                name = genai_attributes.EVALUATION
                yield Event(name, {**given, **source}, round(reward.created_at * _NS))

    def _is_for(self, reward: Reward, place: int | None) -> bool:
        if place is None:
            return reward.turn is None
        return turn_of_reward(reward, self._counted) == place

    def _span(
        self,
        name: str,
        span_id: int,
        parent_id: int | None,
        at: tuple[int, int],
        attributes: Mapping[str, Any],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        events: Sequence[Event] = (),
        status: Status | None = None,
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context=self._context(span_id),
            parent=None if parent_id is None else self._context(parent_id),
            resource=self._resource,
            attributes=_plain(attributes),
            events=events,
            kind=kind,
            status=status or Status(StatusCode.UNSET),
            start_time=max(at[0], 0),
            end_time=max(*at, 0),
            instrumentation_scope=_SCOPE,
        )

    def _context(self, span_id: int) -> SpanContext:
        return SpanContext(
            self._trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
        )


def _call_of(turn: Turn, find: FindsTurn) -> LlmCall:
    """As far as it was recorded; tokens are counted where there are any."""
    call, reply = recorded_call(turn, find), recorded_reply(turn)
    sampled = bool(turn.completion_token_ids)
    usage = (turn.response or {}).get("usage")
    counted = usage_of(len(turn.prompt_token_ids), len(turn.completion_token_ids))
    choice = {"index": 0, "message": reply, "finish_reason": turn.finish_reason}
    body = call.body if call else {}
    return LlmCall(
        {
            "model": turn.asked_model or turn.model,
            "messages": body.get("messages") or [],
            "tools": body.get("tools") or [],
            **turn.sampling,
        },
        {
            "id": (turn.response or {}).get("id"),
            "model": turn.model,
            "choices": [choice],
            "usage": counted if sampled else usage if isinstance(usage, dict) else {},
        },
    )


def _plain(attributes: Any) -> Json:
    """As attributes can be; what is nested becomes JSON text."""
    given = attributes if isinstance(attributes, Mapping) else {}
    return {str(key): _value(value) for key, value in given.items() if value is not None}


def _value(value: Any) -> str | bool | int | float | list[str]:
    if isinstance(value, str | bool | float):
        return value
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else str(value)
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return value
    return dump_json(value)


def _number(kind: str, name: str, size: int) -> int:
    """An id of so many bytes, never zero."""
    digest = hashlib.blake2b(f"{kind} {name}".encode(), digest_size=size).digest()
    return int.from_bytes(digest) or 1
