"""LLM spans into turns, unless their calls are turns already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from tracegrad.events import SpanEnded, Turn
from tracegrad.proxy.capture.call_index import turn_named_by
from tracegrad.proxy.capture.recorder import Recorder
from tracegrad.proxy.otel.commit import commit_each
from tracegrad.proxy.otel.llm_span import Place, Told
from tracegrad.proxy.otel.reported_call import DIALECT, as_call, placed_turn
from tracegrad.proxy.otel.rollout_assignment import Naming
from tracegrad.proxy.otel.semconv import LlmCall
from tracegrad.proxy.prompt_reuse import Continuation, Known
from tracegrad.proxy.store_async import asked

# On LLM spans: whether the span made a turn ("turn"), or its call was one already ("recorded").
CALL_ATTRIBUTE = "tracegrad.call.kind"
# How far an agent's clock may be from ours.
CLOCKS_S = 60.0


class KnowsTurns(Protocol):
    """What `tracegrad.store.Store` does of it."""

    def calling_spans(self, rollout_id: str, *, but: str) -> list[str]: ...
    def rollout_of_turn(self, turn_id: str) -> str | None: ...


class LlmCalls:
    def __init__(
        self, recorder: Recorder, continuation: Continuation, naming: Naming, store: KnowsTurns
    ) -> None:
        self._recorder = recorder
        self._seen = recorder.seen
        self._continuation = continuation
        self._naming = naming
        self._store = store

    async def new(self, told: Sequence[Told]) -> dict[Place, str]:
        """The rollouts of the calls that are no turns yet."""
        new: dict[Place, str] = {}
        read: set[str] = set()
        for each in sorted(told, key=_rank):
            span = each.span
            if each.llm is None:
                continue
            if await self._is_recorded(span, each.llm, read):
                continue
            new[each.place] = span.rollout_id or self._naming.own(span.trace_id)
            self._seen.became_turn(span, each.llm.response_id)
        return new

    async def _is_recorded(self, span: SpanEnded, llm: LlmCall, read: set[str]) -> bool:
        """`read`: the rollouts whose turns were looked through already for these spans."""
        if found := await self._answered_in(span, llm):
            if span.rollout_id is None and len(found) == 1:
                self._naming.join(span.trace_id, *found)
            return True
        named = span.rollout_id or self._naming.rollout_of(span.trace_id)
        if named is not None and named not in read:
            # By another proxy, or by this one before its start.
            read.add(named)
            for span_id in await asked(self._store.calling_spans, named, but=DIALECT):
                self._seen.began(span.trace_id, span_id)
        if self._seen.contains(span.trace_id, span.span_id):
            return True
        return self._seen.told_before(span, llm.response_id)

    async def _answered_in(self, span: SpanEnded, llm: LlmCall) -> set[str]:
        """The rollout of the turn that the client had its answer from: by the answer's id, or,
        where the span tells none, by what was said meanwhile, which may be several."""
        if llm.response_id is None:
            return self._said_in(span, llm)
        found = self._seen.rollout_of_answer(llm.response_id)
        if found is None and (turn_id := turn_named_by(llm.response_id)) is not None:
            found = await asked(self._store.rollout_of_turn, turn_id)
        return {found} if found is not None else set()

    def _said_in(self, span: SpanEnded, llm: LlmCall) -> set[str]:
        if llm.reply is None:
            return set()
        begin, end = span.start_ns / 1e9 - CLOCKS_S, span.end_ns / 1e9 + CLOCKS_S
        return {
            turn.rollout_id
            for turn in self._continuation.same_words(as_call(span, llm), llm.reply)
            if begin <= turn.created_at <= end
            and self._seen.rollout_of_answer(turn.turn.turn_id) is not None
        }

    async def commit(self, new: Mapping[Place, str], told: Sequence[Told]) -> str:
        """What was wrong with one of them; empty where nothing was.

        In rounds of one a rollout: a call may continue the one before it, which has to be stored
        first.
        """
        waiting: dict[str, list[Told]] = {}
        for each in sorted(told, key=lambda each: each.span.start_ns):
            if (rollout_id := new.get(each.place)) is not None:
                waiting.setdefault(rollout_id, []).append(each)
        problem = ""
        while waiting:
            found = await self._commit_round({id: calls[0] for id, calls in waiting.items()})
            problem = problem or found
            waiting = {id: calls[1:] for id, calls in waiting.items() if calls[1:]}
        return problem

    async def _commit_round(self, calls: Mapping[str, Told]) -> str:
        placed = await self._placed(calls)
        refused = await commit_each(self._recorder, [turn for turn, _ in placed])
        stale = [placed[index][0] for index in refused if placed[index][0].parent_id is not None]
        if stale:
            # Their parents were removed since they were read.
            for turn in stale:
                self._continuation.forget(turn.rollout_id)
            placed = await self._placed(calls)
            refused = await commit_each(self._recorder, [turn for turn, _ in placed])
        for index, (_, known) in enumerate(placed):
            if index not in refused:
                self._continuation.add(known)
        return next(iter(refused.values()), "")

    async def _placed(self, calls: Mapping[str, Told]) -> list[tuple[Turn, Known]]:
        return [
            await placed_turn(self._continuation, rollout_id, each.span, each.llm)
            for rollout_id, each in calls.items()
            if each.llm is not None
        ]


def _rank(told: Told) -> tuple[bool, int, int]:
    """Of several libraries that tell of one call, the one that counts comes first: who tells what
    was said; then who is nearer to the call."""
    silent = told.llm is not None and not told.llm.request["messages"]
    return silent, told.span.end_ns, -told.span.start_ns


def marked(told: Told, new: Mapping[Place, str]) -> SpanEnded:
    """An LLM span says in the store what became of it."""
    if told.llm is None:
        return told.span
    rollout_id = new.get(told.place)
    mark = {CALL_ATTRIBUTE: "recorded" if rollout_id is None else "turn"}
    return replace(
        told.span,
        rollout_id=rollout_id or told.span.rollout_id,
        attributes=told.span.attributes | mark,
    )
