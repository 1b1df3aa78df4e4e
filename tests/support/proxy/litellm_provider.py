"""Tiny stand-ins for the APIs of OpenAI and Anthropic on loopback, and calls to them by litellm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from support.engines.raw_http_engine import RawHttpEngine, ReceivedRequest, ServerConnection
from tracegrad.proxy.engine.upstreams.litellm import LiteLLMUpstream
from tracegrad.proxy.http import sse

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Add 1 and 2."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
CALLS = [
    {
        "id": "call_1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    },
    {"id": "call_2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
]


class Provider:
    """A stand-in of one provider: what it answers, as litellm's model name and base URL."""

    def __init__(self, name: str, engine: RawHttpEngine) -> None:
        self.name = name
        self.engine = engine
        engine.behave = self._answer
        self.refusal: tuple[int, str] | None = None
        self.break_after: int | None = None  # pieces of a stream
        self.end_after: int | None = None
        self.hang = asyncio.Event()
        self.hang.set()

    @property
    def model(self) -> str:
        return f"{self.name}/teacher"

    @property
    def api_base(self) -> str:
        return self.engine.url + ("/v1" if self.name == "openai" else "")

    @property
    def asked(self) -> Json:
        body: Json = self.engine.asked[-1].json
        return body

    async def _answer(self, asked: ReceivedRequest, line: ServerConnection) -> None:
        await self.hang.wait()
        if self.refusal is not None:
            status, message = self.refusal
            error = {"type": "error", "error": {"type": "some_error", "message": message}}
            headers = {"content-type": "application/json", "retry-after": "7"}
            await line.answer(json.dumps(error).encode(), status, headers)
        elif asked.json.get("stream"):
            await self._stream(line)
        else:
            answer = OPENAI_ANSWER if self.name == "openai" else ANTHROPIC_ANSWER
            await line.answer(
                json.dumps(answer).encode(), headers={"content-type": "application/json"}
            )

    async def _stream(self, line: ServerConnection) -> None:
        await line.begin()
        pieces = OPENAI_STREAM if self.name == "openai" else ANTHROPIC_STREAM
        for number, piece in enumerate(pieces):
            if number == self.break_after:
                line.reset()
                return
            if number == self.end_after:
                break
            kind = f"event: {piece['type']}\n" if "type" in piece else ""
            await line.piece(f"{kind}data: {json.dumps(piece)}\n\n".encode())
        else:
            if self.name == "openai":
                await line.piece(b"data: [DONE]\n\n")
        await line.end()


OPENAI_ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1700000000,
    "model": "teacher-1",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Adding.",
                "reasoning_content": "One and two.",
                "tool_calls": CALLS,
            },
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 30, "completion_tokens": 9, "total_tokens": 39},
}
ANTHROPIC_ANSWER = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "teacher-1",
    "content": [
        {"type": "thinking", "thinking": "One and two.", "signature": "signed"},
        {"type": "text", "text": "Adding."},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_2", "name": "stop", "input": {}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 30, "output_tokens": 9},
}


def _openai_chunk(delta: Json, finish: str | None = None) -> Json:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {**_OPENAI_HEAD, "choices": choices}


def _tool_delta(index: int, arguments: str, **first: str) -> Json:
    function = {"arguments": arguments, **({"name": first["name"]} if first else {})}
    opening = {"id": first["id"], "type": "function"} if first else {}
    return {"tool_calls": [{"index": index, **opening, "function": function}]}


def _block(index: int, start: Json, *deltas: Json) -> list[Json]:
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


_OPENAI_HEAD = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1700000000,
    "model": "teacher-1",
}
OPENAI_STREAM = [
    _openai_chunk({"role": "assistant", "content": ""}),
    _openai_chunk({"reasoning_content": "One and two."}),
    _openai_chunk({"content": "Add"}),
    _openai_chunk({"content": "ing."}),
    _openai_chunk(_tool_delta(0, "", id="call_1", name="add")),
    _openai_chunk(_tool_delta(0, '{"a": ')),
    _openai_chunk(_tool_delta(0, "1}")),
    _openai_chunk(_tool_delta(1, "{}", id="call_2", name="stop")),
    _openai_chunk({}, "tool_calls"),
    {**_OPENAI_HEAD, "choices": [], "usage": OPENAI_ANSWER["usage"]},
]
ANTHROPIC_STREAM = [
    {
        "type": "message_start",
        "message": {
            **ANTHROPIC_ANSWER,
            "content": [],
            "stop_reason": None,
            "usage": {"input_tokens": 30, "output_tokens": 1},
        },
    },
    *_block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "One and two."},
        {"type": "signature_delta", "signature": "signed"},
    ),
    *_block(
        1,
        {"type": "text", "text": ""},
        {"type": "text_delta", "text": "Add"},
        {"type": "text_delta", "text": "ing."},
    ),
    *_block(
        2,
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {}},
        {"type": "input_json_delta", "partial_json": '{"a": '},
        {"type": "input_json_delta", "partial_json": "1}"},
    ),
    *_block(
        3,
        {"type": "tool_use", "id": "call_2", "name": "stop", "input": {}},
        {"type": "input_json_delta", "partial_json": "{}"},
    ),
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {"output_tokens": 9},
    },
    {"type": "message_stop"},
]

Teacher = Callable[..., LiteLLMUpstream]


def call(provider: Provider, **fields: Any) -> bytes:
    body = {"model": provider.model, "messages": [USER], "max_tokens": 50, **fields}
    return json.dumps(body).encode()


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
AGENT = {"authorization": "Bearer tg-r1", "content-type": "application/json"}


async def whole(upstream: LiteLLMUpstream, body: bytes) -> Json:
    async with upstream.request("POST", CHAT, body=body, headers=AGENT) as answer:
        assert answer.status == 200
        reported: Json = json.loads(await answer.read())
        return reported


async def chunks(upstream: LiteLLMUpstream, body: bytes) -> list[Json]:
    async with upstream.request("POST", CHAT, body=body, headers=AGENT) as answer:
        assert answer.status == 200
        buffer = sse.EventBuffer()
        payloads = [
            sse.event_data(event)
            async for data in answer.content.iter_any()
            for event in buffer.feed(data)
        ]
    assert payloads.pop() == sse.DONE
    return [json.loads(payload or b"") for payload in payloads]
