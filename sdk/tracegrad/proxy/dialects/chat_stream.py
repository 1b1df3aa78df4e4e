"""A streamed chat completion on its way from the engine to a client.

Each chunk is recorded, stripped and passed on as it comes. What ends the stream (chunks with a
finish reason, usage, `[DONE]`) is kept back as `tail`: it goes out after the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from tracegrad.proxy import sse
from tracegrad.proxy.dialects.chat import ChatCall, logprob_entries, strip
from tracegrad.proxy.dialects.replies import Reply, prompt_of
from tracegrad.proxy.errors import ApiError
from tracegrad.records import Json


class ChatStream:
    """`stamp` gives the policy version of tokens that arrive now."""

    def __init__(self, call: ChatCall, stamp: Callable[[], int]) -> None:
        self._call = call
        self._stamp = stamp
        self._events = sse.EventBuffer()
        self._choices: dict[int, _Choice] = {}
        self._head: Json = {}
        self._tail: list[bytes] = []
        self.done = False  # the engine said [DONE]

    def feed(self, data: bytes) -> bytes:
        """What the client may see now of what the engine sent.

        Raises ApiError for a chunk that is none.
        """
        out: list[bytes] = []
        for event in self._events.feed(data):
            payload = sse.payload(event)
            if payload is None:
                out.append(event + b"\n\n")
            elif payload == sse.DONE:
                self.done = True
            else:
                try:
                    self._chunk(payload, out)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ApiError(
                        502, "the engine sent a chunk that cannot be read", kind="upstream_error"
                    ) from error
        return b"".join(out)

    @property
    def tail(self) -> bytes:
        return b"".join(self._tail) + sse.DONE_EVENT

    def replies(self) -> list[Reply]:
        """One for each choice, in order; those cut off have no finish reason."""
        return [self._choices[index].reply(self._head) for index in sorted(self._choices)]

    def _chunk(self, payload: bytes, out: list[bytes]) -> None:
        chunk = orjson.loads(payload)
        choices = chunk.get("choices")
        if choices is None:  # {"error": {...}}
            self._tail.append(sse.event(payload))
            return
        ends = not choices
        version = self._stamp()
        for choice in choices:
            self._record(chunk, choice, version)
            ends = ends or choice.get("finish_reason") is not None
        if usage := chunk.get("usage"):
            self._head["usage"] = usage
        if not self._call.sees_all:
            strip(chunk, "delta", self._call)
            if choices and not ends and _says_nothing(chunk):
                return
            payload = orjson.dumps(chunk)
        (self._tail if ends else out).append(sse.event(payload))

    def _record(self, chunk: Json, choice: Json, version: int) -> None:
        index = choice["index"]
        state = self._choices.get(index)
        if state is None:
            state = self._choices[index] = _Choice(index)
        if not self._head:
            self._head = {key: chunk.get(key) for key in ("id", "created", "model")}
        if (ids := chunk.get("prompt_token_ids")) is not None:
            state.prompt(ids)
        state.tokens.add(choice.get("token_ids"), logprob_entries(choice), version)
        state.say(choice, reasoning=self._call.wants_reasoning)


def _says_nothing(chunk: Json) -> bool:
    """A chunk that carried only token ids: without them the engine would not have sent it."""
    return not chunk.get("usage") and all(not choice["delta"] for choice in chunk["choices"])


class _Choice:
    """One choice, put together from its deltas."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.tokens = Reply()
        self._role = "assistant"
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tools: dict[int, Json] = {}
        self._stop_reason: Any = None

    def prompt(self, ids: object) -> None:
        prompt = prompt_of(ids)
        if prompt is not None:
            self.tokens.prompt_token_ids = prompt

    def say(self, choice: Json, *, reasoning: bool) -> None:
        delta = choice["delta"]
        if role := delta.get("role"):
            self._role = role
        if content := delta.get("content"):
            self._content.append(content)
        if reasoning and (thought := delta.get("reasoning")):
            self._reasoning.append(thought)
        for tool in delta.get("tool_calls") or ():
            self._tool(tool)
        if (finish := choice.get("finish_reason")) is not None:
            self.tokens.finish_reason = finish
            self._stop_reason = choice.get("stop_reason")

    def reply(self, head: Json) -> Reply:
        message: Json = {"role": self._role, "content": "".join(self._content) or None}
        if self._reasoning:
            message["reasoning"] = "".join(self._reasoning)
        if self._tools:
            message["tool_calls"] = [self._tools[index] for index in sorted(self._tools)]
        reply = self.tokens
        reply.response = {
            **head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": self.index,
                    "message": message,
                    "finish_reason": reply.finish_reason,
                    "stop_reason": self._stop_reason,
                }
            ],
        }
        if not reply.prompt_token_ids:
            reply.drop("no_tokens")
        return reply

    def _tool(self, delta: Json) -> None:
        function = delta.get("function") or {}
        known = self._tools.get(delta["index"])
        if known is None:
            known = self._tools[delta["index"]] = {
                "id": None,
                "type": "function",
                "function": {"name": "", "arguments": ""},
            }
        known["id"] = delta.get("id") or known["id"]
        known["function"]["name"] += function.get("name") or ""
        known["function"]["arguments"] += function.get("arguments") or ""
