"""Spans into events: themselves, the turns that LLM spans report, scores, and whole rollouts.

All is made of the spans alone, under ids that never change: an export that is sent again, because
its answer was lost or the store could not be written half-way, changes nothing that is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cachetools import FIFOCache

from tracegrad.events import Span
from tracegrad.proxy.auth.rollout_attribution import TraceIndex
from tracegrad.proxy.capture.recorder import Recorder, commit_each
from tracegrad.proxy.otel.llm_span import ReportedSpan
from tracegrad.proxy.otel.rewards import SpanRewards, TurnOrder
from tracegrad.proxy.otel.rollout_assignment import RolloutAssignment, TraceStore
from tracegrad.proxy.otel.span_to_turn import LlmSpanConverter, TurnLookup, with_call_kind
from tracegrad.proxy.otel.trace_summary import TraceSummary, rollout_finished
from tracegrad.proxy.prompt_reuse.resolver import PromptReuse
from tracegrad.proxy.shared_log import SharedLog
from tracegrad.store.errors import StoreUnavailable

# Traces whose spans are still expected, at most.
_TRACES = 10_000


class SpanStore(TraceStore, TurnLookup, TurnOrder, Protocol):
    """What `tracegrad.store.Store` is asked here."""


class SpanIngest:
    def __init__(
        self,
        recorder: Recorder,
        continuation: PromptReuse,
        traces: TraceIndex,
        store: SpanStore,
        others: SharedLog | None = None,
    ) -> None:
        """`others`: the other workers of the proxy; the spans of a trace may come to several."""
        self._others = others
        if others is not None:
            others.subscribe("trace's span", self._add_note)
        self._recorder = recorder
        self._naming = RolloutAssignment(traces, store)
        self._calls = LlmSpanConverter(recorder, continuation, self._naming, store)
        self._rewards = SpanRewards(self._naming, recorder.call_index, store)
        self._notes: FIFOCache[str, TraceSummary] = FIFOCache(_TRACES)

    async def commit(self, spans: Sequence[ReportedSpan]) -> str:
        """Commits all of it; what is wrong with some of it, empty where nothing is.

        Raises Unavailable when the store cannot be read or written; then it is to be sent again.
        """
        try:
            return await self._taken(spans)
        except StoreUnavailable as error:
            raise self._recorder.store_unavailable(error) from error

    async def _taken(self, reported: Sequence[ReportedSpan]) -> str:
        await self._naming.learn([each.span for each in reported])
        self._note(reported)
        new = await self._calls.find_new(reported)
        roots = self._roots(reported)
        spans = self._naming.with_rollouts([with_call_kind(each, new) for each in reported])
        opened = [self._notes_of(root.trace_id).rollout_started(id, root) for id, root in roots]
        problems = [each.problem for each in reported]
        problems += (await commit_each(self._recorder, [*opened, *spans])).values()
        problems.append(await self._calls.commit(new, reported))
        rewards, problem = await self._rewards.of_spans(reported)
        # Whoever sees that a rollout has ended finds all of it.
        ends = [rollout_finished(id, root) for id, root in roots]
        problems.append(problem)
        problems += (await commit_each(self._recorder, [*rewards, *ends])).values()
        return next(filter(None, problems), "")

    def _note(self, spans: Sequence[ReportedSpan]) -> None:
        for each in spans:
            span = each.span
            self._recorder.call_index.span_received(
                span.trace_id, span.span_id, span.parent_span_id
            )
            if each.is_genai:
                said = TraceSummary.said_by(span)
                if said[0] or said[2]:
                    self._add_note(span.trace_id, *said)
                    if self._others is not None:
                        self._others.publish("trace's span", span.trace_id, *said)

    def _add_note(
        self, trace_id: str, agent: str | None, agent_ns: int, tags: Mapping[str, str]
    ) -> None:
        self._notes_of(trace_id).merge(agent, agent_ns, tags)

    def _notes_of(self, trace_id: str) -> TraceSummary:
        return self._notes.setdefault(trace_id, TraceSummary())

    def _roots(self, spans: Sequence[ReportedSpan]) -> list[tuple[str, Span]]:
        """The rollouts that begin and end with a root span among these. One that somebody named
        is theirs to open and to finish."""
        found: list[tuple[str, Span]] = []
        for each in spans:
            span = each.span
            if span.parent_span_id is not None or span.rollout_id is not None:
                continue
            if each.is_genai:
                self._naming.rollout_or_new(span.trace_id)
            rollout_id = self._naming.rollout_of(span.trace_id)
            if rollout_id is not None and self._ends_with(rollout_id, each):
                found.append((rollout_id, span))
        return found

    def _ends_with(self, rollout_id: str, root: ReportedSpan) -> bool:
        if rollout_id == root.span.trace_id:
            return True
        # A call that lies in no agent's span is a trace of its own, and one of many.
        return root.llm is None and self._recorder.call_index.was_inferred(rollout_id)
