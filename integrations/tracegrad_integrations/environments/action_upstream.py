"""An engine whose replies are the actions that somebody else chooses: the proxy's upstream for
agents that are environments (`agent_env.py`)."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from tracegrad.chat.call import CHAT_PATH
from tracegrad.proxy.engine.upstreams.base import (
    MODELS_PATH,
    TEXT_ONLY,
    Capabilities,
    IteratedBody,
    OnSent,
    UpstreamResponse,
)
from tracegrad.proxy.http.errors import BadRequest
from tracegrad.runner.attempt import Attempt

MODEL = "policy"
Json = dict[str, Any]


class PendingCall:
    """An agent's LLM call that waits for its reply. Made on the proxy's event loop, answered from
    other threads."""

    def __init__(self, request: Json) -> None:
        self.request = request
        self._loop = asyncio.get_running_loop()
        self._reply: asyncio.Future[Json] = self._loop.create_future()
        self.abandoned = False  # its client has hung up

    def answer(self, message: Json) -> None:
        """`message`: an assistant's, of Chat Completions."""
        self._settle(lambda: self._reply.set_result(message))

    def refuse(self, why: str) -> None:
        """By a status that clients do not try again."""
        self._settle(lambda: self._reply.set_exception(BadRequest(why)))

    async def reply(self) -> Json:
        """Raises BadRequest."""
        try:
            return await self._reply
        except asyncio.CancelledError:
            self.abandoned = True
            raise

    def _settle(self, settle: Callable[[], None]) -> None:
        def once() -> None:
            if not self._reply.done():
                settle()

        with suppress(RuntimeError):  # the proxy has ended
            self._loop.call_soon_threadsafe(once)


class AgentCalls:
    """What comes of one rollout, in order: its calls, and its end."""

    def __init__(self) -> None:
        self._coming: queue.SimpleQueue[PendingCall | Attempt | BaseException] = queue.SimpleQueue()
        self._unanswered: set[PendingCall] = set()
        self._lock = threading.Lock()
        self.is_closed = False

    async def reply(self, call: PendingCall) -> Json:
        """Raises BadRequest."""
        with self._lock:
            self._unanswered.add(call)
            if self.is_closed:
                call.refuse(_OVER)
        self._coming.put(call)
        try:
            return await call.reply()
        finally:
            with self._lock:
                self._unanswered.discard(call)

    def ended(self, attempt: Attempt | BaseException) -> None:
        self._coming.put(attempt)

    def next(self) -> PendingCall | Attempt:
        """Waits. Raises what the attempt failed by."""
        while True:
            found = self._coming.get()
            if isinstance(found, BaseException):
                raise found
            if isinstance(found, Attempt) or not found.abandoned:
                return found

    def close(self) -> None:
        """Nobody answers any more."""
        with self._lock:
            self.is_closed = True
            for call in self._unanswered:
                call.refuse(_OVER)


_OVER = "the episode is over: its environment was reset or closed"


class ActionUpstream:
    """`calls`: of the rollouts that somebody steps, by id."""

    def __init__(self) -> None:
        self.capabilities: Capabilities = TEXT_ONLY
        self.calls: dict[str, AgentCalls] = {}

    def open(self) -> None:
        """As of `Upstream`: there is nothing to connect to."""

    async def close(self) -> None:
        for each in [*self.calls.values()]:
            each.close()

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None,
        headers: Mapping[str, str],
        sticky: str | None = None,
        on_sent: OnSent | None = None,
    ) -> AsyncIterator[UpstreamResponse]:
        """As `Upstream.request`. Raises BadRequest."""
        if (method, path) == ("GET", MODELS_PATH):
            yield _response([await self.models()], "application/json")
            return
        if path != CHAT_PATH:
            raise BadRequest(f"{path} is not served: an environment's steps are chat completions")
        calls = self.calls.get(sticky or "")
        if calls is None:
            raise BadRequest("the rollout is no environment's: nobody is there to answer")
        if on_sent is not None:
            on_sent("")
        asked = json.loads(body or b"{}")
        message = await calls.reply(PendingCall(asked))
        if asked.get("stream"):
            yield _response(_events(message), "text/event-stream")
        else:
            yield _response([json.dumps(_completion(message)).encode()], "application/json")

    async def models(self) -> bytes:
        data = [{"id": MODEL, "object": "model", "created": int(time.time()), "owned_by": "you"}]
        return json.dumps({"object": "list", "data": data}).encode()


def assistant_message(action: Any) -> Json:
    """A reply's text, or a message with `content` and `tool_calls`, as Chat Completions has it.

    Raises ValueError.
    """
    if isinstance(action, str):
        return {"role": "assistant", "content": action}
    if not isinstance(action, Mapping):
        raise ValueError(f"action: {action!r:.60} is neither a text nor an assistant's message")
    content, calls = action.get("content"), action.get("tool_calls") or []
    if not (content is None or isinstance(content, str)) or not isinstance(calls, list | tuple):
        raise ValueError(f"action: {action!r:.60}: content is a text, tool_calls a list")
    if content is None and not calls:
        raise ValueError(f"action: {action!r:.60} has neither content nor tool_calls")
    message: Json = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [_tool_call(each) for each in calls]
    return message


def _tool_call(given: Any) -> Json:
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments", "{}") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not isinstance(arguments, str | Mapping):
        raise ValueError(
            f"action: tool_calls: {given!r:.60} is not {{'function': {{'name', 'arguments'}}}}"
        )
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments)
    own_id = str(given.get("id") or f"call_{uuid.uuid4().hex}")
    return {"id": own_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _completion(message: Json) -> Json:
    return {
        "object": "chat.completion",
        **_head(),
        "choices": [{"index": 0, "message": message, "finish_reason": _finish_reason(message)}],
    }


def _events(message: Json) -> list[bytes]:
    head = {"object": "chat.completion.chunk", **_head()}
    delta = dict(message)
    if calls := message.get("tool_calls"):
        delta["tool_calls"] = [{"index": n, **each} for n, each in enumerate(calls)]
    said = {"index": 0, "delta": delta, "finish_reason": None}
    end = {"index": 0, "delta": {}, "finish_reason": _finish_reason(message)}
    chunks = [json.dumps({**head, "choices": [choice]}) for choice in (said, end)]
    return [f"data: {each}\n\n".encode() for each in (*chunks, "[DONE]")]


def _head() -> Json:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": MODEL}


def _finish_reason(message: Json) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def _response(pieces: list[bytes], kind: str) -> UpstreamResponse:
    async def each() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return UpstreamResponse(200, {"content-type": kind}, IteratedBody(each()))
