"""Replies into turns, committed before anybody sees their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from tracegrad.proxy.attribution import Owner, TraceMap
from tracegrad.proxy.continuation import Continuation, Place
from tracegrad.proxy.dialects import chat
from tracegrad.proxy.dialects.chat import ChatCall
from tracegrad.proxy.dialects.replies import Reply, of_one_prompt
from tracegrad.proxy.errors import ApiError, Unavailable
from tracegrad.records import Fact, Turn
from tracegrad.store.errors import StoreError, StoreUnavailable

log = logging.getLogger("tracegrad.proxy")


class SubmitsFacts(Protocol):
    """`tracegrad.store.Writer`, or something that stands for it.

    What is submitted is written, whether or not anybody still waits for the future.
    """

    def submit(self, facts: Sequence[Fact]) -> Future[None]: ...


class Recorder:
    def __init__(self, writer: SubmitsFacts, continuation: Continuation, traces: TraceMap) -> None:
        self._writer = writer
        self._continuation = continuation
        self._traces = traces
        self._failing = False

    def expect(self, owner: Owner) -> None:
        """A call begins: what `record` will need is fetched meanwhile."""
        self._traces.learn(owner.trace_id, owner.rollout_id)
        self._continuation.prefetch(owner.rollout_id)

    async def record(
        self, call: ChatCall, owner: Owner, replies: Sequence[Reply], *, unknown_version: bool
    ) -> None:
        """Commit one turn for each reply. On return they survive a `kill -9`.

        `unknown_version`: a weight push fell into the call. Raises Unavailable when the store
        cannot be written; then none of the turns was recorded.
        """
        try:
            place = await self._continuation.place(
                owner.rollout_id, of_one_prompt(replies), call.messages
            )
            turns = _turns(call, owner, place, replies, unknown_version=unknown_version)
            await self._committed(turns)
        except StoreUnavailable as error:
            raise self.unavailable(error) from error
        except StoreError as error:
            log.error("a turn of rollout %s is lost: %s", owner.rollout_id, error)
            raise ApiError(500, f"the turn was refused: {error}", kind="store_error") from error
        self._traces.learn(owner.trace_id, place.rollout_id)
        for turn in turns:
            self._continuation.add(turn)

    async def commit(self, facts: Sequence[Fact]) -> None:
        """Raises Unavailable; a fact that the store refuses raises its `FactRefused`."""
        try:
            await self._committed(facts)
        except StoreUnavailable as error:
            raise self.unavailable(error) from error

    async def _committed(self, facts: Sequence[Fact]) -> None:
        await asyncio.wrap_future(self._writer.submit(facts))
        if self._failing:
            self._failing = False
            log.warning("the store can be written again")

    def unavailable(self, error: StoreUnavailable) -> Unavailable:
        """Says it once in the log, not once a call, until the store is back."""
        if not self._failing:
            self._failing = True
            log.error("%s; calls are answered with 503 until it can be written", error)
        return Unavailable(f"the store cannot be written: {error}", code="store_unavailable")


def _turns(
    call: ChatCall,
    owner: Owner,
    place: Place,
    replies: Sequence[Reply],
    *,
    unknown_version: bool,
) -> list[Turn]:
    sampling = call.sampling()
    settings_reason = call.untrainable(sampling)
    prompt = of_one_prompt(replies)
    return [
        Turn(
            rollout_id=place.rollout_id,
            parent_id=place.parent_id,
            fork_reason=place.fork_reason,
            dialect=chat.NAME,
            model=str(reply.response.get("model") or call.body.get("model") or ""),
            prompt_token_ids=prompt,
            completion_token_ids=reply.token_ids,
            completion_logprobs=reply.logprobs,
            policy_versions=tuple(reply.versions),
            sampling=sampling,
            finish_reason=reply.finish_reason,
            untrainable=_untrainable(reply, unknown_version) or settings_reason,
            parent_span_id=owner.parent_span_id,
            request=call.body,
            response=reply.response or None,
        )
        for reply in replies
    ]


def _untrainable(reply: Reply, unknown_version: bool) -> str | None:
    if reply.finish_reason is None or reply.finish_reason == "abort":
        return "aborted"
    if reply.broken is not None or not reply.token_ids:
        return reply.broken or "no_tokens"
    return "version_unknown" if unknown_version else None
