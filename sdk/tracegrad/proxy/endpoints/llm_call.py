"""One LLM call from end to end: client -> engine -> store -> client.

    read and attribute -> exact prompt -> wait at the gate -> ask the engine
    -> place the turn in its tree -> commit -> let the client see the end

Endpoints are bare ASGI applications: nothing here runs once a token that does not have to.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import parse_qsl

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tracegrad.chat import sampling_params
from tracegrad.chat.call import CHAT_PATH, Call
from tracegrad.events import OVER_LENGTH, Json, Turn, new_id
from tracegrad.proxy.auth.middleware import caller_of, engine_headers
from tracegrad.proxy.auth.rollout_attribution import CallOwner, TraceIndex, attribute_call
from tracegrad.proxy.capture.call_timing import CallTiming
from tracegrad.proxy.capture.recorder import Recorder
from tracegrad.proxy.capture.retry_cache import (
    Fingerprint,
    RetryCache,
    fingerprint,
    is_retry,
    recorded_answer,
    recorded_chunks,
)
from tracegrad.proxy.dialects.base import Dialect, StreamWriter
from tracegrad.proxy.engine.completion import SampledCompletion
from tracegrad.proxy.engine.intake_gate import IntakeGate
from tracegrad.proxy.engine.reasoning_effort import ReasoningEfforts
from tracegrad.proxy.engine.request import EngineRequest, request_body
from tracegrad.proxy.engine.request_rules import RequestRules
from tracegrad.proxy.engine.response import (
    EngineResponse,
    read_error,
    read_response,
    strip_unrequested,
)
from tracegrad.proxy.engine.resume import resumed
from tracegrad.proxy.engine.routed_experts import warn_streams_lack_experts
from tracegrad.proxy.engine.stream import EngineStream
from tracegrad.proxy.engine.upstreams import Upstream, UpstreamResponse
from tracegrad.proxy.engine.weight_gate import Admission, WeightUpdateGate
from tracegrad.proxy.http import sse
from tracegrad.proxy.http.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, EngineDied
from tracegrad.proxy.http.request import (
    ClientDisconnected,
    Headers,
    cancel_on_disconnect,
    headers_of,
    read_body,
)
from tracegrad.proxy.http.request_body import WorkerThreads, lease_of
from tracegrad.proxy.http.streaming_response import StreamedResponse
from tracegrad.proxy.metrics.call_metrics import count_call
from tracegrad.proxy.metrics.counters import ProxyMetrics
from tracegrad.proxy.prompt_reuse.resolver import ContinuationPlan, PromptReuse
from tracegrad.store.errors import StoreUnavailable

log = logging.getLogger("tracegrad.proxy")


@dataclass(frozen=True, slots=True)
class ProxyServices:
    """What every endpoint works with."""

    upstream: Upstream
    gate: WeightUpdateGate
    intake: IntakeGate | None  # where calls are paced
    recorder: Recorder
    prompt_reuse: PromptReuse
    trace_index: TraceIndex
    retry_cache: RetryCache
    model: str | None
    force_on_policy: bool
    engine_grammar: sampling_params.EngineGrammar
    efforts: ReasoningEfforts
    routed_experts: bool
    workers: WorkerThreads
    rules: RequestRules
    keepalive_s: float
    metrics: ProxyMetrics


@dataclass(frozen=True, slots=True)
class CallContext:
    """One call on its way. `resumed` is for the rest of a stream: the call, and the tokens that the
    engine goes on behind."""

    call: Call
    owner: CallOwner
    plan: ContinuationPlan
    headers: Headers  # for the engine
    admission: Admission
    fingerprint: Fingerprint
    timing: CallTiming
    resumed: tuple[Call, array[int] | None] | None = None


class LlmCallEndpoint:
    """`POST` of one dialect's calls."""

    def __init__(self, dialect: Dialect, services: ProxyServices) -> None:
        self._dialect = dialect
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        timing = CallTiming(scope.get("tracegrad.arrived_at"))
        metrics = self._services.metrics
        status = "5xx"  # whatever is no answer and no refusal is a fault of ours
        metrics.add("calls_in_flight")
        try:
            try:
                response = await self._handle(scope, receive, send, timing)
                status = "broken" if timing.broken else "2xx"
            except ApiError as error:
                status = f"{error.status // 100}xx"
                response = error.response(self._dialect.error(error))
            if response is not None:
                await response(scope, receive, send)
        except ClientDisconnected:
            status = "aborted"
        except asyncio.CancelledError:
            status = "aborted"
            raise
        finally:
            metrics.add("calls_in_flight", number=-1)
            count_call(metrics, self._dialect.name, status, timing.recorded, timing.first_token_s)

    async def _handle(
        self, scope: Scope, receive: Receive, send: Send, timing: CallTiming
    ) -> Response | None:
        headers = headers_of(scope)
        path = scope["path_params"]
        caller = caller_of(scope)
        owner = attribute_call(
            headers, path.get("rollout"), caller.rollout_id, self._services.trace_index
        )
        index = self._services.recorder.call_index
        index.rollout_called(owner.rollout_id)
        call, known = await self._parse(scope, await read_body(receive), owner)
        if call.previous is not None:
            sent = call.size
            call, owner = await self._services.recorder.with_previous(call, owner)
            await lease_of(scope).acquire(call.size - sent)
        run, rules = self._services.workers.run, self._services.rules
        call = await run(call.size, rules.apply, call.with_one_system(), admin=caller.admin)
        if self._services.force_on_policy:
            call = _on_policy(call)
        if call.path == CHAT_PATH and sampling_params.engine_constrains(
            call.body, self._services.engine_grammar
        ):
            call = replace(call, untrainable=call.untrainable or "constrained")
        if is_retry(headers) and (given := await self._recorded_turns(known)):
            return await self._replay_recorded(call, given, scope, send)
        plan = await self._plan(call, owner)
        # A body in one piece cannot be split by version: where weights are pushed, the engine
        # streams to us what the client gets whole; but no stream has routed experts.
        streaming = call.stream or (
            self._services.gate.pushes and not self._services.routed_experts
        )
        if call.stream and self._services.routed_experts:
            warn_streams_lack_experts()
        admission = self._services.gate.admission(plan.rollout_id, streaming=streaming)
        # vLLM makes an answer's id of it, by which feedback finds the turn.
        to_engine = engine_headers(caller) | {"x-request-id": call.turn_id}
        timing.streaming = streaming
        context = CallContext(call, owner, plan, to_engine, admission, known, timing)
        try:
            if call.stream:
                await self._stream(context, scope, receive, send)
                index.call_ended(owner.rollout_id, failed=timing.broken)
                return None
            context, answer = await self._answer(context, receive)
        except (ApiError, ClientDisconnected) as error:
            self._services.retry_cache.record_failure(known)
            if isinstance(error, ApiError):
                index.call_ended(owner.rollout_id, failed=error.status >= 500)
            raise
        index.call_ended(owner.rollout_id, failed=False)
        body = self._dialect.answer(context.call, answer)
        return Response(body, media_type="application/json")

    async def _plan(self, call: Call, owner: CallOwner) -> ContinuationPlan:
        recorder = self._services.recorder
        self._services.trace_index.add(owner.trace_id, owner.rollout_id)
        recorder.call_index.call_started(owner.trace_id, owner.parent_span_id)
        try:
            return await self._services.prompt_reuse.plan(owner.rollout_id, call)
        except StoreUnavailable as error:
            raise recorder.store_unavailable(error) from error

    async def _parse(self, scope: Scope, raw: bytes, owner: CallOwner) -> tuple[Call, Fingerprint]:
        query = scope["query_string"]
        asked = dict(parse_qsl(query.decode("latin-1"))) if query else {}

        def read() -> tuple[Call, Fingerprint]:
            call = self._dialect.parse(raw, scope["path_params"], asked)
            known = fingerprint(owner.rollout_id, scope["path"], raw)
            return replace(call, size=len(raw)), known

        return await self._services.workers.run(len(raw), read)

    async def _recorded_turns(self, known: Fingerprint) -> list[Turn]:
        return await self._services.recorder.recorded_turns(
            self._services.retry_cache.lookup(known)
        )

    async def _replay_recorded(
        self, call: Call, turns: Sequence[Turn], scope: Scope, send: Send
    ) -> Response | None:
        """What was recorded for the same call: its client did not get it."""
        self._services.metrics.add("answered_retries_total")
        call = replace(call, turn_id=turns[0].turn_id)
        answer = recorded_answer(turns, call)
        strip_unrequested(answer, call.visible)
        if not call.stream:
            return Response(self._dialect.answer(call, answer), media_type="application/json")
        writer = self._dialect.writer(call)
        said, ends = recorded_chunks(answer, call)
        out = [writer.begin(len(turns[0].prompt_token_ids)), *map(writer.chunk, said)]
        with StreamedResponse(
            scope, send, writer.content_type, writer.keepalive, self._services.keepalive_s
        ) as response:
            await response.send(b"".join(out) + writer.end(ends), last=True)
        return None

    async def _answer(self, context: CallContext, receive: Receive) -> tuple[CallContext, Json]:
        """An engine that died in the middle is asked once more, as most clients would: this one has
        seen nothing yet. What the first one sampled is a turn of its own, aborted."""
        try:
            return context, await self._complete(context, receive)
        except EngineDied as error:
            log.warning("a call is made again: %s", error.message)
        context.timing.begin_again()
        call = replace(context.call, turn_id=new_id())
        streaming = context.admission.streaming
        again = replace(
            context,
            call=call,
            headers={**context.headers, "x-request-id": call.turn_id},
            admission=self._services.gate.admission(context.plan.rollout_id, streaming=streaming),
        )
        return again, await self._complete(again, receive)

    async def _complete(self, context: CallContext, receive: Receive) -> Json:
        """The answer in one piece, committed."""
        call, admission = context.call, context.admission
        stream = EngineStream(call, admission.arrival_version) if admission.streaming else None
        try:
            async with (
                cancel_on_disconnect(receive),
                self._admitted(context),
                self._engine_response(context) as engine,
            ):
                if stream is None:
                    answer = read_response(await engine.read(), call, admission.version)
                else:
                    answer = await _collect(engine, stream)
            context.timing.engine_queued_s = answer.queued_s
        except ApiError:
            if stream is not None and (completions := stream.completions()):
                await self._record_partial(context, completions)
            raise
        except BaseException:  # a client that left, a server that ends, or a fault of ours
            await self._record_partial(context, stream.completions() if stream else [])
            raise
        await self._record(context, answer.completions)
        return answer.body

    async def _stream(
        self, context: CallContext, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """The answer chunk by chunk, of two engines where the first one dies. Raises ApiError only
        while no stream has begun."""
        writer = self._dialect.writer(context.call)
        stream = EngineStream(context.call, context.admission.arrival_version)
        broken: ApiError | None = None
        with StreamedResponse(
            scope, send, writer.content_type, writer.keepalive, self._services.keepalive_s
        ) as response:
            relay = _Relay(stream, writer, response)
            try:
                broken = await self._relay(context, relay, receive)
                if isinstance(broken, EngineDied):
                    broken = await self._relay_the_rest(context, stream, relay, receive, broken)
            except ApiError as refusal:
                if not response.begun:
                    raise
                context.timing.broken = True
                self._services.retry_cache.record_failure(context.fingerprint)
                await response.send(writer.error(refusal), last=True)
                return
            except BaseException:  # a client that left, a server that ends, or a fault of ours
                await self._record_partial(context, stream.completions())
                raise
            await self._finish(context, stream, writer, response, broken)

    async def _relay(
        self, context: CallContext, relay: _Relay, receive: Receive
    ) -> ApiError | None:
        """What broke the stream, if anything did. Raises ApiError: none has begun."""
        async with (
            cancel_on_disconnect(receive),
            self._admitted(context),
            self._engine_response(context) as engine,
        ):
            return await relay.run(engine, context.admission)

    async def _relay_the_rest(
        self,
        context: CallContext,
        stream: EngineStream,
        relay: _Relay,
        receive: Receive,
        died: EngineDied,
    ) -> ApiError | None:
        """Once, from the next engine that is up, behind what the client has. What broke that too,
        or `died` where nobody can go on."""
        if not self._services.upstream.capabilities.exact_prompts:
            return died
        said = stream.said_so_far()
        rest = None if said is None else resumed(context.call, said[1])
        if said is None or rest is None:
            return died
        ids, count = said
        log.warning("a stream goes on behind %d tokens: %s", count, died.message)
        if count:
            context.timing.goes_on()
        else:
            context.timing.begin_again()
        admission = self._services.gate.admission(context.plan.rollout_id, streaming=True)
        again = replace(context, admission=admission, resumed=(rest, ids or None))
        stream.go_on(admission.arrival_version, count)
        try:
            return await self._relay(again, relay, receive)
        except ApiError as error:
            return error
        finally:
            # One turn: what is not known of the rest is not known of it.
            context.admission.version_unknown |= admission.version_unknown

    async def _finish(
        self,
        context: CallContext,
        stream: EngineStream,
        writer: StreamWriter,
        response: StreamedResponse,
        broken: ApiError | None,
    ) -> None:
        """Commit, and only then send what ends the stream; or say why it does not end well."""
        context.timing.engine_queued_s = stream.queued_s
        try:
            await self._record(context, stream.completions() or [SampledCompletion()])
        except ApiError as failure:
            broken = failure
        if broken is not None and not response.begun:
            raise broken
        if broken is None:
            await response.send(writer.end(stream.tail), last=True)
            return
        context.timing.broken = True
        self._services.retry_cache.record_failure(context.fingerprint)
        await response.send(writer.error(broken), last=True)

    @asynccontextmanager
    async def _admitted(self, context: CallContext) -> AsyncIterator[None]:
        """Between the gate and the engine's last word."""
        timing, gate_held_s = context.timing, context.admission.gate_held_s
        timing.entered_gate()
        if self._services.intake is not None:
            await self._services.intake.enter(context.owner.rollout_id)
        async with context.admission:
            timing.admitted()
            before_s = gate_held_s()
            try:
                yield
            finally:
                timing.ended()
                timing.held_s += gate_held_s() - before_s

    def _cache_salt(self, admission: Admission) -> str | None:
        """Where weights are pushed, and the engine may keep its cache meanwhile (push.kv_cache):
        what earlier versions computed is of no use to this one."""
        if not self._services.gate.pushes or not self._services.upstream.capabilities.tokens:
            return None
        return str(admission.version)

    @asynccontextmanager
    async def _engine_response(self, context: CallContext) -> AsyncIterator[UpstreamResponse]:
        """The engine's answer with status 200. Raises ApiError for any other."""
        asked, prompt_ids = context.resumed or (context.call, None)
        efforts = self._services.efforts
        ask = EngineRequest(
            stream=context.admission.streaming,
            model=context.admission.model or self._services.model,
            prompt_ids=prompt_ids or context.plan.prompt_ids,
            return_tokens=self._services.upstream.capabilities.tokens,
            routed_experts_from=context.plan.routed_experts_from,
            cache_salt=self._cache_salt(context.admission),
        )
        while True:
            call = efforts.fitted(asked)
            body = await self._services.workers.run(call.size, request_body, call, ask)
            context.timing.asked()
            async with self._services.upstream.request(
                "POST",
                call.path,
                body=body,
                headers=context.headers,
                sticky=context.plan.rollout_id,
                on_sent=partial(_was_sent, context),
            ) as engine:
                if engine.status == 200:
                    context.timing.answered()
                    yield engine
                    return
                refusal = read_error(engine.status, await engine.read(), engine.headers)
            if not efforts.learn(refusal, call):
                break
        if refusal.code == CONTEXT_LENGTH_EXCEEDED:
            context.timing.ended()
            await self._services.recorder.record_refusal(
                asked, context.owner, context.plan, OVER_LENGTH, context.timing
            )
        raise refusal

    async def _record_partial(
        self, context: CallContext, completions: Sequence[SampledCompletion]
    ) -> None:
        """Record what the engine said of an answer that nobody got the end of."""
        if not context.admission.admitted:
            return
        try:
            await self._record(context, completions or [SampledCompletion()])
        except ApiError as error:
            log.error("an aborted turn is lost: %s", error.message)

    async def _record(self, context: CallContext, completions: Sequence[SampledCompletion]) -> None:
        turn_ids = await self._services.recorder.record(
            context.call,
            context.owner,
            context.plan,
            completions,
            unknown_version=context.admission.version_unknown,
            timing=context.timing,
        )
        if all(completion.finish_reason is not None for completion in completions):
            self._services.retry_cache.record_answer(context.fingerprint, turn_ids)


def _on_policy(call: Call) -> Call:
    """Sampled freely; a client that wants one tool call at a time gets the first that came."""
    one = call.body.get("parallel_tool_calls") is False
    return replace(
        call,
        body=sampling_params.force_on_policy(call.body),
        visible=replace(call.visible, one_tool_call=one),
    )


def _was_sent(context: CallContext, upstream: str) -> None:
    context.timing.sent()
    context.admission.sent_to(upstream)


async def _collect(engine: UpstreamResponse, stream: EngineStream) -> EngineResponse:
    def consume(data: bytes) -> bool:
        stream.feed(data)
        return False

    async def drained() -> None:
        raise AssertionError("nobody is behind")

    try:
        await engine.deliver(consume, drained)
    except ApiError:
        if not stream.done:  # what breaks off behind its end was whole
            raise
    if (broken := _broken_end(stream)) is not None:
        raise broken
    return EngineResponse(stream.assemble(), stream.completions(), stream.queued_s)


class _Relay:
    """Passes the engine's chunks on to the client as they come."""

    def __init__(
        self,
        stream: EngineStream,
        writer: StreamWriter,
        response: StreamedResponse,
    ) -> None:
        self._stream = stream
        self._admission: Admission | None = None  # of the engine that speaks
        self._writer = writer
        self._response = response
        self._begun = False
        self._first: list[bytes] = []  # what came with the first words, to be passed on after them

    async def run(self, engine: UpstreamResponse, admission: Admission) -> ApiError | None:
        """Returns what broke the stream, if anything did."""
        self._admission, self._first = admission, []
        if self._begun:
            await self._response.drain()  # of what the one before said last
        try:
            await engine.deliver(self._consume, self._drained, self._pass_frames)
        except ApiError as error:
            if error is not self._stream.error and not self._stream.done:
                return error
        if not self._begun:
            await self._response.send(self._writer.begin(self._stream.prompt_tokens))
        return _broken_end(self._stream)

    def _consume(self, data: bytes) -> bool:
        if not self._begun:
            self._first = list(sse.split_first_events(data))
            data = self._first.pop(0)
        return self._pass(data) or bool(self._first)

    def _pass(self, data: bytes) -> bool:
        """Whether the client is behind. Raises the stream's error."""
        behind = False
        if chunks := self._stream.feed(data):
            out = [] if self._begun else [self._writer.begin(self._stream.prompt_tokens)]
            self._begun = True
            out += [c if isinstance(c, bytes) else self._writer.chunk(c) for c in chunks]
            behind = self._response.write(b"".join(out))
        if self._stream.error is not None:
            raise self._stream.error
        return behind

    def _pass_frames(self, data: bytes) -> bool | None:
        """None: `_consume` is to have it."""
        if self._first:
            return None
        frames = self._stream.pass_frames(data)
        return None if frames is None else self._response.write_frames(frames)

    async def _drained(self) -> None:
        assert self._admission is not None, "an engine speaks"
        self._admission.blocked = True
        await self._response.drain()
        while self._first:
            if self._pass(self._first.pop(0)):
                await self._response.drain()
        self._admission.blocked = False


def _broken_end(stream: EngineStream) -> ApiError | None:
    if stream.error is not None or stream.done:
        return stream.error
    return EngineDied("the engine broke off its answer: it has no end")
