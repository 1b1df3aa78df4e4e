"""Which rollout a span belongs to.

First match wins: the attribute `tracegrad.rollout` of the span or its resource; the rollout that
the span's trace is known to belong to, here or in the store; else the trace of an agent is a
rollout of its own, by the trace's id. Spans of a trace that nothing is known of yet are nobody's,
until one of an agent comes: then the store gives them to its rollout (`store/write/events.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from tracegrad.events import Span
from tracegrad.proxy.auth.rollout_attribution import TraceIndex
from tracegrad.proxy.store_async import run_in_thread


class TraceStore(Protocol):
    """What `tracegrad.store.Store` does of it."""

    def rollouts_of_traces(self, trace_ids: Collection[str]) -> list[tuple[str, str]]: ...


class RolloutAssignment:
    def __init__(self, traces: TraceIndex, store: TraceStore) -> None:
        self._traces = traces
        self._store = store

    async def learn(self, spans: Iterable[Span]) -> None:
        """From names, and from what is stored of traces that are new here. Raises what the store
        raises."""
        for span in spans:
            self._traces.add(span.trace_id, span.rollout_id)
        new = {span.trace_id for span in spans if not self._traces.knows(span.trace_id)}
        if new:
            found = await run_in_thread(self._store.rollouts_of_traces, new)
            for trace_id, rollout_id in found:
                self._traces.add(trace_id, rollout_id)

    def assign(self, trace_id: str, rollout_id: str) -> None:
        """A call of the trace is known to be the rollout's."""
        self._traces.add(trace_id, rollout_id)

    async def only_rollout_of(self, trace_id: str) -> str | None:
        """None where the trace was ever seen with several, here or in the store: who calls a model
        says which trace it belongs to, and might name another's. Raises what the store raises."""
        found = {
            name for _, name in await run_in_thread(self._store.rollouts_of_traces, [trace_id])
        }
        if self._traces.knows(trace_id):
            here = self._traces.rollout_of(trace_id)
            if here is None:
                return None
            found.add(here)
        return found.pop() if len(found) == 1 else None

    def rollout_of(self, trace_id: str) -> str | None:
        return self._traces.rollout_of(trace_id)

    def rollout_or_new(self, trace_id: str) -> str:
        """The rollout of a call that has to have one: the trace itself, if it has no other.

        Where a trace is around several rollouts, that is one of its own beside them.
        """
        if not self._traces.knows(trace_id):
            self._traces.add(trace_id, trace_id)
        return self._traces.rollout_of(trace_id) or trace_id

    def with_rollouts(self, spans: Sequence[Span]) -> list[Span]:
        """With the rollouts of their traces, where these are known."""
        return [
            span
            if span.rollout_id is not None
            else replace(span, rollout_id=self._traces.rollout_of(span.trace_id))
            for span in spans
        ]
