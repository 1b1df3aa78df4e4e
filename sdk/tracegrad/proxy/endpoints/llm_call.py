"""The walk of one LLM call: client -> engine -> store -> client.

    read and attribute -> exact prompt -> wait at the gate -> ask the engine
    -> place the turn in its tree -> commit -> let the client see the end

Endpoints are bare ASGI applications: nothing here runs once a token that does not have to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tracegrad.chat import sampling_params
from tracegrad.events import OVER_LENGTH, Json, Turn
from tracegrad.proxy.auth.middleware import caller_of, engine_headers
from tracegrad.proxy.auth.rollout_attribution import Owner, TraceMap, attribute
from tracegrad.proxy.capture.recorder import Recorder
from tracegrad.proxy.capture.retry_cache import (
    Fingerprint,
    Repeats,
    answer_of,
    chunks_of,
    fingerprint,
    is_repeat,
)
from tracegrad.proxy.dialects.base import Call, Dialect, StreamWriter
from tracegrad.proxy.engine.completion import Reply
from tracegrad.proxy.engine.request_rules import RequestRules
from tracegrad.proxy.engine.response import (
    Answer,
    Ask,
    read_answer,
    read_error,
    request_body,
    strip,
)
from tracegrad.proxy.engine.routed_experts import say_of_streams
from tracegrad.proxy.engine.stream import EngineStream
from tracegrad.proxy.engine.upstreams import Incoming, Upstream
from tracegrad.proxy.engine.weight_gate import Gate, Passage
from tracegrad.proxy.http import sse
from tracegrad.proxy.http.errors import TOO_LONG, ApiError
from tracegrad.proxy.http.request import (
    ClientGone,
    Headers,
    headers_of,
    read_body,
    while_client_waits,
)
from tracegrad.proxy.http.request_body import lease_of
from tracegrad.proxy.http.streaming_response import Line
from tracegrad.proxy.http.worker_threads import Workers
from tracegrad.proxy.prompt_reuse import Plan

log = logging.getLogger("tracegrad.proxy")


@dataclass(frozen=True, slots=True)
class Rooms:
    """What every endpoint works with."""

    upstream: Upstream
    gate: Gate
    recorder: Recorder
    traces: TraceMap
    repeats: Repeats
    model: str | None
    free_sampling: bool
    routed_experts: bool
    workers: Workers
    rules: RequestRules
    keepalive_s: float


@dataclass(frozen=True, slots=True)
class Visit:
    """One call on its way."""

    call: Call
    owner: Owner
    plan: Plan
    headers: Headers  # for the engine
    passage: Passage
    fingerprint: Fingerprint


class Calls:
    """`POST` of one dialect's calls."""

    def __init__(self, dialect: Dialect, rooms: Rooms) -> None:
        self._dialect = dialect
        self._rooms = rooms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._walk(scope, receive, send)
        except ApiError as error:
            response = error.response(self._dialect.error(error))
        except ClientGone:
            return
        if response is not None:
            await response(scope, receive, send)

    async def _walk(self, scope: Scope, receive: Receive, send: Send) -> Response | None:
        headers = headers_of(scope)
        path = scope["path_params"]
        caller = caller_of(scope)
        owner = attribute(headers, path.get("rollout"), caller.rollout_id, self._rooms.traces)
        call, known = await self._read(scope, await read_body(receive), owner)
        if call.previous is not None:
            sent = call.size
            call, owner = await self._rooms.recorder.continued(call, owner)
            await lease_of(scope).take(call.size - sent)
        run, rules = self._rooms.workers.run, self._rooms.rules
        call = await run(call.size, rules.apply, call.with_one_system(), admin=caller.admin)
        if self._rooms.free_sampling:
            call = replace(call, body=sampling_params.freed(call.body))
        if is_repeat(headers) and (given := await self._given(known)):
            return await self._again(call, given, send)
        plan = await self._rooms.recorder.plan(call, owner)
        # A body in one piece cannot be split by version: where weights are pushed, the engine
        # streams to us what the client gets whole; but no stream has routed experts.
        streaming = call.stream or (self._rooms.gate.pushes and not self._rooms.routed_experts)
        if call.stream and self._rooms.routed_experts:
            say_of_streams()
        passage = self._rooms.gate.passage(plan.rollout_id, streaming=streaming)
        visit = Visit(call, owner, plan, engine_headers(caller), passage, known)
        try:
            if call.stream:
                await self._streamed(visit, receive, send)
                return None
            answer = await self._whole(visit, receive)
        except (ApiError, ClientGone):
            self._rooms.repeats.failed(known)
            raise
        return Response(self._dialect.answer(call, answer), media_type="application/json")

    async def _read(self, scope: Scope, raw: bytes, owner: Owner) -> tuple[Call, Fingerprint]:
        query = scope["query_string"]
        asked = dict(parse_qsl(query.decode("latin-1"))) if query else {}

        def read() -> tuple[Call, Fingerprint]:
            call = self._dialect.parse(raw, scope["path_params"], asked)
            known = fingerprint(owner.rollout_id, scope["path"], raw)
            return replace(call, size=len(raw)), known

        return await self._rooms.workers.run(len(raw), read)

    async def _given(self, known: Fingerprint) -> list[Turn]:
        return await self._rooms.recorder.read(self._rooms.repeats.recall(known))

    async def _again(self, call: Call, turns: Sequence[Turn], send: Send) -> Response | None:
        """What was recorded for the same call: its client did not get it."""
        call = replace(call, turn_id=turns[0].turn_id)
        answer = answer_of(turns, call)
        strip(answer, call.shown)
        if not call.stream:
            return Response(self._dialect.answer(call, answer), media_type="application/json")
        writer = self._dialect.writer(call)
        said, ends = chunks_of(answer, call)
        out = [writer.begin(len(turns[0].prompt_token_ids)), *map(writer.chunk, said)]
        with Line(send, writer.content_type, writer.keepalive, self._rooms.keepalive_s) as line:
            await line.say(b"".join(out) + writer.end(ends), last=True)
        return None

    async def _whole(self, visit: Visit, receive: Receive) -> Json:
        """The answer in one piece, committed."""
        call, passage = visit.call, visit.passage
        stream = EngineStream(call, passage.stamp) if passage.streaming else None
        try:
            async with while_client_waits(receive), passage, self._asked(visit) as engine:
                if stream is None:
                    answer = read_answer(await engine.read(), call, passage.version)
                else:
                    answer = await _gathered(engine, stream)
        except (ClientGone, asyncio.CancelledError):
            await self._keep(visit, stream.replies() if stream else [])
            raise
        except ApiError:
            if stream is not None and (replies := stream.replies()):
                await self._keep(visit, replies)
            raise
        await self._record(visit, answer.replies)
        return answer.body

    async def _streamed(self, visit: Visit, receive: Receive, send: Send) -> None:
        """The answer chunk by chunk. Raises ApiError only while no stream has begun."""
        writer = self._dialect.writer(visit.call)
        stream = EngineStream(visit.call, visit.passage.stamp)
        broken: ApiError | None = None
        with Line(send, writer.content_type, writer.keepalive, self._rooms.keepalive_s) as line:
            try:
                async with while_client_waits(receive), visit.passage, self._asked(visit) as engine:
                    broken = await _pump(engine, stream, visit.passage, writer, line)
            except (ClientGone, asyncio.CancelledError):
                await self._keep(visit, stream.replies())
                raise
            except ApiError as refusal:
                if not line.begun:
                    raise
                self._rooms.repeats.failed(visit.fingerprint)
                await line.say(writer.error(refusal), last=True)
                return
            await self._finish(visit, stream, writer, line, broken)

    async def _finish(
        self,
        visit: Visit,
        stream: EngineStream,
        writer: StreamWriter,
        line: Line,
        broken: ApiError | None,
    ) -> None:
        """Commit, and only then send what ends the stream; or say why it does not end well."""
        try:
            await self._record(visit, stream.replies() or [Reply()])
        except ApiError as failure:
            broken = failure
        if broken is not None and not line.begun:
            raise broken
        if broken is None:
            await line.say(writer.end(stream.tail), last=True)
            return
        self._rooms.repeats.failed(visit.fingerprint)
        await line.say(writer.error(broken), last=True)

    @asynccontextmanager
    async def _asked(self, visit: Visit) -> AsyncIterator[Incoming]:
        """The engine's answer with status 200. Raises ApiError for any other."""
        call = visit.call
        ask = Ask(
            stream=visit.passage.streaming,
            model=self._rooms.model,
            prompt_ids=visit.plan.prompt_ids,
            capture=self._rooms.upstream.capabilities.tokens,
            routes_from=visit.plan.routes_from,
        )
        body = await self._rooms.workers.run(call.size, request_body, call, ask)
        async with self._rooms.upstream.request(
            "POST",
            call.path,
            body=body,
            headers=visit.headers,
            sticky=visit.plan.rollout_id,
        ) as engine:
            if engine.status == 200:
                yield engine
                return
            refusal = read_error(engine.status, await engine.read(), engine.headers)
        if refusal.code == TOO_LONG:
            await self._rooms.recorder.refused(call, visit.owner, visit.plan, OVER_LENGTH)
        raise refusal

    async def _keep(self, visit: Visit, replies: Sequence[Reply]) -> None:
        """Record what the engine said of an answer that nobody got the end of."""
        if not visit.passage.admitted:
            return
        try:
            await self._record(visit, replies or [Reply()])
        except ApiError as error:
            log.error("an aborted turn is lost: %s", error.message)

    async def _record(self, visit: Visit, replies: Sequence[Reply]) -> None:
        turn_ids = await self._rooms.recorder.record(
            visit.call, visit.owner, visit.plan, replies, unknown_version=visit.passage.unknown
        )
        if all(reply.finish_reason is not None for reply in replies):
            self._rooms.repeats.answered(visit.fingerprint, turn_ids)


async def _gathered(engine: Incoming, stream: EngineStream) -> Answer:
    async for data in engine.iter_any():
        stream.feed(data)
    if (broken := _unfinished(stream)) is not None:
        raise broken
    return Answer(stream.whole(), stream.replies())


async def _pump(
    engine: Incoming,
    stream: EngineStream,
    passage: Passage,
    writer: StreamWriter,
    line: Line,
) -> ApiError | None:
    """Pass the engine's chunks on as they come. Returns what broke the stream, if anything did."""
    begun = False
    try:
        async for data in engine.iter_any():
            for part in (data,) if begun else sse.first_ones_alone(data):
                if chunks := stream.feed(part):
                    out = [] if begun else [writer.begin(stream.prompt_tokens)]
                    begun = True
                    out += map(writer.chunk, chunks)
                    passage.blocked = True
                    await line.say(b"".join(out))
                    passage.blocked = False
            if stream.error is not None:
                break
    except ApiError as error:
        return error
    if not begun:
        await line.say(writer.begin(stream.prompt_tokens))
    return _unfinished(stream)


def _unfinished(stream: EngineStream) -> ApiError | None:
    if stream.error is not None or stream.done:
        return stream.error
    message = "the engine broke off its answer: it has no end"
    return ApiError(502, message, kind="upstream_error")
