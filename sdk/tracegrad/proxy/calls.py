"""The walk of one chat completion: client -> engine -> store -> client.

    read and attribute -> wait at the gate -> ask the engine -> place the turn in its tree
    -> commit -> let the client see the end

These are bare ASGI applications: nothing here runs once a token that does not have to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

import aiohttp
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tracegrad.proxy import sse
from tracegrad.proxy.attribution import Owner, attribute, minted
from tracegrad.proxy.connection import ClientGone, read_body, while_client_waits
from tracegrad.proxy.dialects import chat
from tracegrad.proxy.dialects.chat import ChatCall
from tracegrad.proxy.dialects.chat_stream import ChatStream
from tracegrad.proxy.dialects.replies import Reply
from tracegrad.proxy.errors import ApiError
from tracegrad.proxy.gate import Gate, Passage
from tracegrad.proxy.recorder import Recorder
from tracegrad.proxy.upstream import Upstream

log = logging.getLogger("tracegrad.proxy")

Headers = Mapping[str, str]

_RELAYED = ("content-type", "retry-after")
_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
    ],
}


def headers_of(scope: Scope) -> dict[str, str]:
    return {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}


def engine_headers(headers: Headers) -> dict[str, str]:
    """A client's own key goes on to the engine; one that was minted for a rollout does not."""
    sent = {"content-type": "application/json"}
    authorization = headers.get("authorization")
    if authorization is not None and not minted(authorization):
        sent["authorization"] = authorization
    return sent


async def relayed(answer: aiohttp.ClientResponse) -> Response:
    """The engine's answer as it is. Raises ApiError when it breaks off."""
    kept = {name: answer.headers[name] for name in _RELAYED if name in answer.headers}
    try:
        return Response(await answer.read(), answer.status, kept)
    except aiohttp.ClientError as error:
        raise broken_off(error) from error


def broken_off(error: Exception) -> ApiError:
    reason = str(error) or type(error).__name__
    return ApiError(502, f"the engine broke off its answer: {reason}", kind="upstream_error")


class ChatCompletions:
    """`POST …/v1/chat/completions`."""

    def __init__(
        self,
        upstream: Upstream,
        gate: Gate,
        recorder: Recorder,
        *,
        model: str | None,
        max_body_bytes: int,
    ) -> None:
        self._upstream = upstream
        self._gate = gate
        self._recorder = recorder
        self._model = model
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            call = chat.parse(await read_body(receive, self._max_body_bytes))
            headers = headers_of(scope)
            owner = attribute(headers, scope["path_params"].get("rollout"))
            self._recorder.expect(owner)
            walk = self._streamed if call.stream else self._whole
            response = await walk(call, owner, engine_headers(headers), receive, send)
        except ApiError as error:
            response = error.response()
        except ClientGone:
            return
        if response is not None:
            await response(scope, receive, send)

    async def _whole(
        self, call: ChatCall, owner: Owner, headers: Headers, receive: Receive, send: Send
    ) -> Response | None:
        """An answer in one piece."""
        passage = self._gate.passage(streaming=False)
        try:
            async with while_client_waits(receive), passage, self._ask(call, headers) as engine:
                answer = await relayed(engine)
        except (ClientGone, asyncio.CancelledError):
            await self._keep(call, owner, [], passage)
            raise
        if answer.status_code != 200:
            return answer
        body, replies = chat.read_answer(bytes(answer.body), call, passage.version)
        await self._recorder.record(call, owner, replies, unknown_version=passage.unknown)
        return Response(body, media_type="application/json")

    async def _streamed(
        self, call: ChatCall, owner: Owner, headers: Headers, receive: Receive, send: Send
    ) -> Response | None:
        """An answer chunk by chunk. Returns a response only if no stream has begun."""
        passage = self._gate.passage(streaming=True)
        stream = ChatStream(call, passage.stamp)
        try:
            async with while_client_waits(receive), passage, self._ask(call, headers) as engine:
                if engine.status != 200:
                    return await relayed(engine)
                await send(_STREAM_START)
                broken = await _pump(engine, stream, passage, send)
        except (ClientGone, asyncio.CancelledError):
            await self._keep(call, owner, stream.replies(), passage)
            raise
        if broken is None and not stream.done:
            broken = broken_off(EOFError("it has no end"))
        await self._finish(call, owner, stream, passage, broken, send)
        return None

    def _ask(
        self, call: ChatCall, headers: Headers
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        body = call.for_engine(self._model)
        return self._upstream.request("POST", chat.PATH, body=body, headers=headers)

    async def _finish(
        self,
        call: ChatCall,
        owner: Owner,
        stream: ChatStream,
        passage: Passage,
        broken: ApiError | None,
        send: Send,
    ) -> None:
        """Commit, and only then send what ends the stream; or say why it does not end well."""
        replies = stream.replies() or [Reply()]
        try:
            await self._recorder.record(call, owner, replies, unknown_version=passage.unknown)
        except ApiError as failure:
            broken = failure
        end = stream.tail if broken is None else sse.event(broken.body())
        await send({"type": "http.response.body", "body": end})

    async def _keep(
        self, call: ChatCall, owner: Owner, replies: list[Reply], passage: Passage
    ) -> None:
        """Record what the engine said to a client that did not wait for the end."""
        if not passage.admitted:
            return
        try:
            await self._recorder.record(
                call, owner, replies or [Reply()], unknown_version=passage.unknown
            )
        except ApiError as error:
            log.error("an aborted turn is lost: %s", error.message)


async def _pump(
    engine: aiohttp.ClientResponse, stream: ChatStream, passage: Passage, send: Send
) -> ApiError | None:
    """Pass the engine's chunks on as they come. Returns what broke the stream, if anything did."""
    try:
        async for data in engine.content.iter_any():
            if out := stream.feed(data):
                passage.blocked = True
                await send({"type": "http.response.body", "body": out, "more_body": True})
                passage.blocked = False
    except aiohttp.ClientError as error:
        return broken_off(error)
    except ApiError as error:
        return error
    return None


class Models:
    """`GET …/v1/models`: the engine's own answer."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = engine_headers(headers_of(scope))
        try:
            async with self._upstream.request(
                "GET", "/v1/models", body=None, headers=headers
            ) as answer:
                response = await relayed(answer)
        except ApiError as error:
            response = error.response()
        await response(scope, receive, send)
