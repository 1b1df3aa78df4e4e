"""Replies into turns, committed before anybody sees their end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from time import monotonic
from typing import Protocol

from cachetools import FIFOCache

from tracegrad.chat import sampling_params as sampling
from tracegrad.chat.call import Call
from tracegrad.digests import blake2b
from tracegrad.events import REFUSED, Event, Json, RolloutInferred, Turn, new_id
from tracegrad.jsonutil import dump_json, encode_json
from tracegrad.proxy.auth.rollout_attribution import CallOwner, TraceIndex
from tracegrad.proxy.capture.call_index import MOST_REMEMBERED, CallIndex
from tracegrad.proxy.capture.call_timing import CallTiming, timing_json
from tracegrad.proxy.capture.redaction import REDACTED, Redactor
from tracegrad.proxy.dialects.history import TurnNotRecorded, conversation_of
from tracegrad.proxy.engine.completion import SampledCompletion
from tracegrad.proxy.http.errors import ApiError, BadRequest, Unavailable
from tracegrad.proxy.http.json_size import count_punctuation, parsed_memory
from tracegrad.proxy.metrics.call_metrics import count_turns
from tracegrad.proxy.metrics.counters import ProxyMetrics
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason
from tracegrad.proxy.prompt_reuse.resolver import ContinuationPlan, PromptReuse, TreePosition
from tracegrad.proxy.prompt_reuse.tree_cache import CachedTurn, TurnReader, cached_turn
from tracegrad.proxy.shared_log import SharedLog
from tracegrad.proxy.store_async import run_in_thread, wait_committed
from tracegrad.store import Submission, WriterLoad
from tracegrad.store.errors import (
    EventRejected,
    ParentMissing,
    RolloutTaken,
    StoreError,
    StoreUnavailable,
)

log = logging.getLogger("tracegrad.proxy")

# Of so many rollouts, the latest, the seconds of commits wait for the next turn to say them, and of
# so many turns of each (those of parallel calls).
_MOST_TIMED, _MOST_COMMITS = 4096, 64


class EventWriter(Protocol):
    """`tracegrad.store.GroupCommitWriter`, or something that stands for it.

    What is submitted is written, whether or not anybody waits for it, unless it is withdrawn.
    """

    def submit(self, events: Sequence[Event]) -> Submission: ...

    def load(self) -> WriterLoad: ...


class Recorder:
    def __init__(
        self,
        writer: EventWriter,
        store: TurnReader,
        continuation: PromptReuse,
        traces: TraceIndex,
        redactor: Redactor,
        *,
        patience_s: float | None = None,
        others: SharedLog | None = None,
        metrics: ProxyMetrics | None = None,
        remembered: int = MOST_REMEMBERED,
        rollouts: int = MOST_REMEMBERED,
    ) -> None:
        """`patience_s`: as `store_async.wait_committed`. `others`: the other workers. `metrics`:
        where turns are counted. `remembered`: calls that are known by their ids; `rollouts`: those
        of which something is known without the store."""
        self._patience_s = patience_s
        self._writer = writer
        self._store = store
        self._continuation = continuation
        self._traces = traces
        self._redactor = redactor
        self._metrics = metrics or ProxyMetrics()
        self._failing = False
        self._commits: FIFOCache[str, dict[str, float]] = FIFOCache(min(_MOST_TIMED, rollouts))
        self.call_index = CallIndex(remembered, others, rollouts=rollouts)

    async def record(
        self,
        call: Call,
        owner: CallOwner,
        plan: ContinuationPlan,
        replies: Sequence[SampledCompletion],
        *,
        unknown_version: bool,
        timing: CallTiming | None = None,
    ) -> list[str]:
        """Commit one turn for each reply; their ids. On return they survive a `kill -9`.

        `unknown_version`: a weight push fell into the call. Raises Unavailable when the store
        cannot be written; then none of the turns was recorded, or none will be trained.
        """
        try:
            places = await self._places(plan, replies)
            begun_at = monotonic()
            stages = timing.stages(begun_at) if timing is not None else {}
            seconds = None
            if timing is not None:
                seconds = self._timing_json(stages, timing.held_s, places[0].rollout_id)
            turns = _turns(
                call, owner, places, replies, unknown_version=unknown_version, timing=seconds
            )
            self.call_index.turns_answered(turns, inferred=owner.rollout_id is None)
            inferred = None
            if not owner.is_named:
                inferred = RolloutInferred(rollout_id=turns[0].rollout_id)
            try:
                found = await self._committed(turns, plan, inferred)
            except ParentMissing:
                # The rollout was pruned under our hands.
                self._continuation.forget(turns[0].rollout_id)
                turns = [_root(turn, ForkReason.REMOVED) for turn in turns]
                found = await self._committed(turns, plan, inferred)
            except RolloutTaken:
                turns, found = await self._committed_elsewhere(turns, plan)
        except StoreUnavailable as error:
            self._metrics.add("turns_lost_total", "store_unavailable", number=len(replies))
            raise self.store_unavailable(error) from error
        except StoreError as error:
            self._metrics.add("turns_lost_total", "refused", number=len(replies))
            log.error("a turn of rollout %s is lost: %s", owner.rollout_id, error)
            raise ApiError(500, f"the turn was refused: {error}", kind="store_error") from error
        commit_s = monotonic() - begun_at
        self._note_commit(turns, commit_s)
        count_turns(self._metrics, turns, plan.reused_tokens)
        if timing is not None:
            timing.recorded = {**stages, "commit": commit_s}
        self._traces.add(owner.trace_id, turns[0].rollout_id)
        for turn in found:
            self._continuation.add(turn)
        return [turn.turn_id for turn in turns]

    def _timing_json(self, stages: dict[str, float], held_s: float, rollout_id: str) -> Json:
        """With how long the rollout's turns before took to be committed: no row can say that of
        itself."""
        found = timing_json(stages, held_s)
        if (before := self._commits.pop(rollout_id, None)) is not None:
            found["commits"] = before
        return found

    def _note_commit(self, turns: Sequence[Turn], seconds: float) -> None:
        known = self._commits.setdefault(turns[0].rollout_id, {})
        if len(known) < _MOST_COMMITS:
            known |= {turn.turn_id: round(seconds, 6) for turn in turns}

    async def _committed_elsewhere(
        self, turns: Sequence[Turn], plan: ContinuationPlan
    ) -> tuple[list[Turn], list[CachedTurn]]:
        """Nobody named their rollout, and training took it while their client paused: they begin
        another one, with the very tokens that they were sampled after."""
        taken, rollout_id = turns[0].rollout_id, new_id()
        moved = [
            replace(_root(turn, ForkReason.ROLLOUT_TAKEN), rollout_id=rollout_id) for turn in turns
        ]
        self.call_index.turns_moved(moved)
        begun = RolloutInferred(rollout_id=rollout_id, continues=taken)
        found = await self._committed(moved, plan, begun)
        before = {turn.turn_id: (taken, turn.parent_id) for turn in turns if turn.parent_id}
        return moved, [turn._replace(before=before.get(turn.turn.turn_id)) for turn in found]

    async def _committed(
        self, turns: Sequence[Turn], plan: ContinuationPlan, inferred: RolloutInferred | None
    ) -> list[CachedTurn]:
        committed = await self._submitted(turns if inferred is None else [inferred, *turns])
        found = _known(turns, plan)  # while the disk works
        await self._settled(committed)
        return found

    async def with_previous(self, call: Call, owner: CallOwner) -> tuple[Call, CallOwner]:
        """The call with the conversation that it only names. Raises BadRequest for one that is
        not in the store, Unavailable."""
        assert call.previous is not None
        try:
            earlier, rollout_id, size = await run_in_thread(self._earlier, call.previous)
            if owner.rollout_id not in (None, rollout_id):
                raise TurnNotRecorded(call.previous)  # another rollout's is nobody else's to read
        except TurnNotRecorded as missing:
            why = " Its text is not stored: send the conversation." if missing.textless else ""
            raise BadRequest(
                f"Previous response with id 'resp_{call.previous}' not found.{why}",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from None
        except StoreUnavailable as error:
            raise self.store_unavailable(error) from error
        if owner.rollout_id is None:
            owner = replace(owner, rollout_id=rollout_id)
        return replace(call.continuing(earlier), size=call.size + size), owner

    def _earlier(self, turn_id: str) -> tuple[list[Json], str, int]:
        """The messages, whose they are, and the bytes of memory that they take."""
        turn = self._find(turn_id)
        if turn is None:
            raise TurnNotRecorded(turn_id)
        messages = conversation_of(turn_id, self._find)
        text = encode_json(messages)
        return messages, turn.rollout_id, parsed_memory(text, *count_punctuation(text))

    def _find(self, turn_id: str) -> Turn | None:
        return self._store.find_turn(turn_id, expert_routing=False)

    async def recorded_turns(self, turn_ids: Sequence[str]) -> list[Turn]:
        """Recorded turns, as far as they are there, and as the client had them. Raises
        Unavailable."""
        if self._redactor.is_active:
            return []
        try:
            found = [await run_in_thread(self._find, turn_id) for turn_id in turn_ids]
        except StoreUnavailable as error:
            raise self.store_unavailable(error) from error
        return [turn for turn in found if turn is not None and _is_as_it_was(turn)]

    async def record_refusal(
        self,
        call: Call,
        owner: CallOwner,
        plan: ContinuationPlan,
        reason: str,
        timing: CallTiming | None = None,
    ) -> None:
        """Commit a turn without tokens: the engine would not answer, for this `reason`."""
        refusal = SampledCompletion(finish_reason=REFUSED)
        refusal.discard_tokens(reason)
        await self.record(call, owner, plan, [refusal], unknown_version=False, timing=timing)

    async def _places(
        self, plan: ContinuationPlan, replies: Sequence[SampledCompletion]
    ) -> list[TreePosition]:
        """One for each reply; choices of one prompt share it."""
        if len(replies) == 1:
            return [await self._continuation.position(plan, replies[0].prompt_token_ids)]
        found: dict[bytes, TreePosition] = {}
        places: list[TreePosition] = []
        for reply in replies:
            key = reply.prompt_token_ids.tobytes()
            if key not in found:
                found[key] = await self._continuation.position(plan, reply.prompt_token_ids)
                plan = replace(plan, rollout_id=found[key].rollout_id)
            places.append(found[key])
        return places

    async def commit(self, events: Sequence[Event]) -> None:
        """Raises Unavailable; an event that the store refuses raises its `EventRejected`."""
        try:
            await self._settled(await self._submitted(events))
        except StoreUnavailable as error:
            raise self.store_unavailable(error) from error

    async def _submitted(self, events: Sequence[Event]) -> Submission:
        return self._writer.submit(await self._redactor.redact(events))

    async def _settled(self, submission: Submission) -> None:
        await wait_committed(submission, patience_s=self._patience_s)
        if self._failing:
            self._failing = False
            log.warning("the store can be written again")

    def store_unavailable(self, error: StoreUnavailable) -> Unavailable:
        """Says it once in the log, not once a call, until the store is back."""
        if not self._failing:
            self._failing = True
            log.error("%s; calls are answered with 503 until it can be written", error)
        return Unavailable(f"the store cannot be written: {error}", code="store_unavailable")


def _turns(
    call: Call,
    owner: CallOwner,
    places: Sequence[TreePosition],
    replies: Sequence[SampledCompletion],
    *,
    unknown_version: bool,
    timing: Json | None,
) -> list[Turn]:
    settings = sampling.sampling_params_of(call.body)
    reason = call.untrainable or sampling.untrainable_reason(call.body, settings)
    observation = observation_of(call.own_messages)
    names = [str(each.response.get("model") or call.body.get("model") or "") for each in replies]
    return [
        Turn(
            turn_id=new_id() if number else call.turn_id,
            rollout_id=place.rollout_id,
            parent_id=place.parent_id,
            fork_reason=place.fork_reason,
            dialect=call.dialect,
            model=served,
            prompt_token_ids=reply.prompt_token_ids,
            completion_token_ids=reply.token_ids,
            completion_logprobs=reply.logprobs,
            policy_versions=tuple(reply.versions),
            sampling=settings,
            finish_reason=reply.finish_reason,
            untrainable=_untrainable(reply, unknown_version) or reason,
            parent_span_id=owner.parent_span_id,
            request=call.request,
            response=reply.response or None,
            state_key=owner.state_key,
            agent_name=owner.agent_name,
            asked_model=call.asked_model(served),
            observation=observation,
            timing=timing,
            routed_experts=reply.routed_experts,
        )
        for number, (place, reply, served) in enumerate(zip(places, replies, names, strict=True))
    ]


def _is_as_it_was(turn: Turn) -> bool:
    """Its answer was neither dropped nor redacted since."""
    return turn.response is not None and REDACTED not in dump_json(turn.response)


def _root(turn: Turn, reason: ForkReason) -> Turn:
    """The turn without the one that it continues; a reason that it had says more."""
    known = turn.fork_reason if reason is ForkReason.ROLLOUT_TAKEN else None
    return replace(turn, parent_id=None, fork_reason=known or reason.value)


def _known(turns: Sequence[Turn], plan: ContinuationPlan) -> list[CachedTurn]:
    """What later calls may continue."""
    try:
        return [cached_turn(turn, plan.conversation) for turn in turns]
    except Exception:
        # As in `plan`: it is kept, and served, all the same.
        log.exception("turns of rollout %s will not be continued", turns[0].rollout_id)
        return []


def _untrainable(reply: SampledCompletion, unknown_version: bool) -> str | None:
    if reply.finish_reason is None or reply.finish_reason == "abort":
        return "aborted"
    if reply.discard_reason is not None or not reply.token_ids:
        return reply.discard_reason or "no_tokens"
    return "version_unknown" if unknown_version else None


def observation_of(messages: Sequence[Json]) -> str | None:
    """Digest, 32 hex digits, of the messages behind the last reply; of all, before the first.

    Roles and contents count. Instructions (system, developer) do not: they are the agent's. Nor
    do the ids of tool calls, which are new in every rollout. None: nothing was observed.
    """
    behind = takewhile(lambda message: message.get("role") != "assistant", reversed(messages))
    observed = [
        [message.get("role"), message.get("content")]
        for message in behind
        if message.get("role") not in ("system", "developer")
    ]
    if not observed:
        return None
    return blake2b(encode_json(observed[::-1]), 16).hex()


async def commit_each(recorder: Recorder, events: Sequence[Event]) -> dict[int, str]:
    """Why some were refused, by their index; all others are stored. Raises Unavailable."""
    try:
        await recorder.commit(events)
    except EventRejected as error:
        if len(events) == 1:
            log.warning("an event that a span reports is refused: %s", error)
            return {0: str(error)}
    else:
        return {}
    refused: dict[int, str] = {}
    for index, event in enumerate(events):
        if problem := await commit_each(recorder, [event]):
            refused[index] = problem[0]
    return refused
