"""LLM spans into turns, unless their calls are turns already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Protocol

from tracegrad.chat.call import Call
from tracegrad.events import Span, Turn, logprob_array, token_id_array
from tracegrad.protocol import CALL_KIND_ATTRIBUTE, TURN_ATTRIBUTE
from tracegrad.proxy.capture.call_index import turn_id_in_response
from tracegrad.proxy.capture.recorder import Recorder, commit_each
from tracegrad.proxy.dialects.registry import OtelDialect
from tracegrad.proxy.otel.llm_span import ReportedSpan, SpanKey
from tracegrad.proxy.otel.rollout_assignment import RolloutAssignment
from tracegrad.proxy.otel.semconv import LlmCall
from tracegrad.proxy.prompt_reuse.resolver import ContinuationPlan, PromptReuse, TreePosition
from tracegrad.proxy.prompt_reuse.tree_cache import CachedTurn, cached_turn
from tracegrad.proxy.store_async import run_in_thread

# How far an agent's clock may be from ours.
MAX_CLOCK_SKEW_S = 60.0


class TurnLookup(Protocol):
    """What `tracegrad.store.Store` does of it."""

    def calling_spans(self, rollout_id: str, *, except_dialect: str) -> list[str]: ...
    def rollout_of_turn(self, turn_id: str) -> str | None: ...


class LlmSpanConverter:
    def __init__(
        self,
        recorder: Recorder,
        continuation: PromptReuse,
        naming: RolloutAssignment,
        store: TurnLookup,
    ) -> None:
        self._recorder = recorder
        self._seen = recorder.call_index
        self._continuation = continuation
        self._naming = naming
        self._store = store

    async def find_new(self, spans: Sequence[ReportedSpan]) -> dict[SpanKey, str]:
        """The rollouts of the calls that are no turns yet."""
        new: dict[SpanKey, str] = {}
        read: set[str] = set()
        for each in sorted(spans, key=_rank):
            span = each.span
            if each.llm is None:
                continue
            if await self._is_recorded(span, each.llm, read):
                continue
            new[each.key] = span.rollout_id or self._naming.rollout_or_new(span.trace_id)
            self._seen.turn_created(span, each.llm.response_id)
        return new

    async def _is_recorded(self, span: Span, llm: LlmCall, read: set[str]) -> bool:
        """`read`: the rollouts whose turns were looked through already for these spans."""
        if found := await self._answered_in(span, llm):
            if span.rollout_id is None and len(found) == 1:
                self._naming.assign(span.trace_id, *found)
            return True
        named = span.rollout_id or self._naming.rollout_of(span.trace_id)
        if named is not None and named not in read:
            # By another proxy, or by this one before its start.
            read.add(named)
            for span_id in await run_in_thread(
                self._store.calling_spans, named, except_dialect=DIALECT
            ):
                self._seen.call_started(span.trace_id, span_id)
        if self._seen.has_call_inside(span.trace_id, span.span_id):
            return True
        return self._seen.is_duplicate(span, llm.response_id)

    async def _answered_in(self, span: Span, llm: LlmCall) -> set[str]:
        """The rollout of the turn that the client had its answer from: by the answer's id, or,
        where the span has none, by what was said meanwhile, which may be several."""
        if llm.response_id is None:
            return self._said_in(span, llm)
        found = self._seen.rollout_of_response(llm.response_id)
        if found is None and (turn_id := turn_id_in_response(llm.response_id)) is not None:
            found = await run_in_thread(self._store.rollout_of_turn, turn_id)
        return {found} if found is not None else set()

    def _said_in(self, span: Span, llm: LlmCall) -> set[str]:
        if llm.reply is None:
            return set()
        begin, end = span.start_ns / 1e9 - MAX_CLOCK_SKEW_S, span.end_ns / 1e9 + MAX_CLOCK_SKEW_S
        return {
            turn.rollout_id
            for turn in self._continuation.find_same_words(as_call(span, llm), llm.reply)
            if begin <= turn.created_at <= end
            and self._seen.rollout_of_response(turn.turn.turn_id) is not None
        }

    async def commit(self, new: Mapping[SpanKey, str], spans: Sequence[ReportedSpan]) -> str:
        """What was wrong with one of them; empty where nothing was.

        In rounds of one a rollout: a call may continue the one before it, which has to be stored
        first.
        """
        waiting: dict[str, list[ReportedSpan]] = {}
        for each in sorted(spans, key=lambda each: each.span.start_ns):
            if (rollout_id := new.get(each.key)) is not None:
                waiting.setdefault(rollout_id, []).append(each)
        problem = ""
        while waiting:
            found = await self._commit_round({id: calls[0] for id, calls in waiting.items()})
            problem = problem or found
            waiting = {id: calls[1:] for id, calls in waiting.items() if calls[1:]}
        return problem

    async def _commit_round(self, calls: Mapping[str, ReportedSpan]) -> str:
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

    async def _placed(self, calls: Mapping[str, ReportedSpan]) -> list[tuple[Turn, CachedTurn]]:
        return [
            await positioned_turn(self._continuation, rollout_id, each.span, each.llm)
            for rollout_id, each in calls.items()
            if each.llm is not None
        ]


def _rank(reported: ReportedSpan) -> tuple[bool, int, int]:
    """Of several libraries that report one call, the one that counts comes first: the one that has
    the messages; then the one nearer to the call."""
    silent = reported.llm is not None and not reported.llm.request["messages"]
    return silent, reported.span.end_ns, -reported.span.start_ns


def with_call_kind(reported: ReportedSpan, new: Mapping[SpanKey, str]) -> Span:
    """An LLM span says in the store what became of it."""
    if reported.llm is None:
        return reported.span
    rollout_id = new.get(reported.key)
    mark = {CALL_KIND_ATTRIBUTE: "recorded" if rollout_id is None else "turn"}
    turn_id = turn_id_in_response(reported.llm.response_id)
    if rollout_id is None and turn_id is not None:
        mark[TURN_ATTRIBUTE] = turn_id
    return replace(
        reported.span,
        rollout_id=rollout_id or reported.span.rollout_id,
        attributes=reported.span.attributes | mark,
    )


DIALECT = OtelDialect.name


def turn_id_of(span: Span) -> str:
    """Always the same for a span: sending it twice makes one turn."""
    name = f"turn {span.trace_id} {span.span_id}"
    return blake2b(name.encode(), digest_size=16).hexdigest()


def as_call(span: Span, llm: LlmCall) -> Call:
    return Call(DIALECT, llm.request, llm.request, stream=False, turn_id=turn_id_of(span))


async def positioned_turn(
    continuation: PromptReuse, rollout_id: str, span: Span, llm: LlmCall
) -> tuple[Turn, CachedTurn]:
    """The turn, and what later turns need to know of it. Raises what the store raises.

    Its parent is the latest turn of the rollout whose words it goes on from; no tokens prove it.
    """
    call = as_call(span, llm)
    try:
        plan, place = await continuation.position_reported(rollout_id, call)
    except RecursionError:  # the store says what is wrong with it
        plan, place = ContinuationPlan(rollout_id, None), TreePosition(rollout_id, None, None)
    turn = Turn(
        turn_id=call.turn_id,
        rollout_id=rollout_id,
        parent_id=place.parent_id,
        fork_reason=place.fork_reason,
        dialect=DIALECT,
        model=llm.model,
        prompt_token_ids=token_id_array(),
        completion_token_ids=token_id_array(),
        completion_logprobs=logprob_array(),
        policy_versions=(),
        sampling=llm.sampling,
        finish_reason=llm.finish_reason,
        untrainable="no_tokens",
        parent_span_id=span.span_id,
        request=llm.request,
        response=llm.response,
        asked_model=call.asked_model(llm.model),
        timing={"inference": max(0, span.end_ns - span.start_ns) / 1e9},
        created_at=span.start_ns / 1e9,
    )
    return turn, cached_turn(turn, plan.conversation)
