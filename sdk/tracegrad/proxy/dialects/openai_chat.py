"""OpenAI's chat completions, which the canonical form is taken from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tracegrad.chat.call import Call, VisibleFields
from tracegrad.chat.messages import media_untrainable_reason
from tracegrad.chat.sampling_params import DEFAULTS
from tracegrad.events import Json
from tracegrad.proxy.dialects.body_checks import (
    BOOL,
    INTEGER,
    NUMBER,
    OBJECT,
    STRING,
    check_types,
    json_object,
)
from tracegrad.proxy.http import sse
from tracegrad.proxy.http.errors import ApiError, BadRequest

# Fields whose type the proxy relies on; the engine judges the rest.
FIELD_TYPES = {
    "model": STRING,
    "stream": BOOL,
    "logprobs": BOOL,
    "return_token_ids": BOOL,
    "include_reasoning": BOOL,
    "chat_template_kwargs": OBJECT,
    "reasoning_effort": STRING,
    "n": INTEGER,
    **dict.fromkeys(DEFAULTS, NUMBER),
}
# The proxy's own; an agent that sends one of them would choose its own prompt unseen.
REFUSED_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_NOT_FOR_THE_ENGINE = ("stream", "stream_options", "return_token_ids")


class OpenAIChatDialect:
    name = "chat"

    def parse(self, raw: bytes, path: Mapping[str, Any], query: Mapping[str, str]) -> Call:
        request = json_object(raw)
        check_messages(request.get("messages"))
        check_types(request, FIELD_TYPES)
        check_common(request)
        _check_tools(request.get("tools"))
        return Call(
            dialect=self.name,
            request=request,
            body=engine_body(request),
            stream=bool(request.get("stream")),
            visible=VisibleFields(
                ids=bool(request.get("return_token_ids")),
                logprobs=bool(request.get("logprobs")),
                reasoning=request.get("include_reasoning") is not False,
                usage=wants_usage(request),
            ),
            untrainable=media_untrainable_reason(request["messages"]),
        )

    def answer(self, call: Call, answer: Json) -> bytes:
        return orjson.dumps(answer)

    def writer(self, call: Call) -> ChatStreamWriter:
        return ChatStreamWriter()

    def error(self, error: ApiError) -> bytes:
        return error.body()


class ChatStreamWriter:
    """The engine's own chunks are the client's."""

    content_type = "text/event-stream; charset=utf-8"

    def begin(self, prompt_tokens: int | None) -> bytes:
        return b""

    def chunk(self, chunk: Json) -> bytes:
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def end(self, chunks: Sequence[Json]) -> bytes:
        return b"".join(map(self.chunk, chunks)) + sse.DONE_EVENT

    def error(self, error: ApiError) -> bytes:
        return sse.encode_event(error.body())

    def keepalive(self) -> bytes:
        return b": \n\n"


def engine_body(request: Json) -> Json:
    return {name: value for name, value in request.items() if name not in _NOT_FOR_THE_ENGINE}


def check_common(request: Json) -> None:
    """What chat and text completions share. Raises BadRequest."""
    if (n := request.get("n")) is not None and n < 1:
        raise BadRequest("n is less than 1", param="n")
    for name in REFUSED_FIELDS:
        if request.get(name) is not None:
            raise BadRequest(f"{name} is not served here; leave it out", param=name)
    options = request.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest("stream_options is not an object", param="stream_options")


def check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is not a list of at least one message", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"{where} is not an object with a role", param=where)
        _check_content(message.get("content"), where)
        _check_calls(message.get("tool_calls"), where)


def _check_tools(tools: object) -> None:
    if tools is None:
        return
    if not isinstance(tools, list):
        raise BadRequest("tools is not a list", param="tools")
    for index, tool in enumerate(tools):
        if not _has_function(tool):
            where = f"tools[{index}]"
            raise BadRequest(f"{where} has no function with a name", param=where)


def _check_content(content: object, where: str) -> None:
    parts = content if isinstance(content, list) else []
    if not (content is None or isinstance(content, str | list)) or not all(map(_is_part, parts)):
        name = f"{where}.content"
        raise BadRequest(f"{name} is not a string or a list of parts", param=name)


def _is_part(part: object) -> bool:
    """A text, or an object with a type, and a text where its type says so."""
    if not isinstance(part, dict):
        return isinstance(part, str)
    kind = part.get("type")
    return isinstance(kind, str) and (kind != "text" or isinstance(part.get("text"), str))


def _check_calls(calls: object, where: str) -> None:
    if calls is None:
        return
    name = f"{where}.tool_calls"
    if not isinstance(calls, list):
        raise BadRequest(f"{name} is not a list", param=name)
    for index, call in enumerate(calls):
        if not _has_function(call):
            name = f"{name}[{index}]"
            raise BadRequest(f"{name} has no function with a name", param=name)


def _has_function(tool: object) -> bool:
    """Of a tool, or a call of one: a function with a name."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def wants_usage(request: Json) -> bool:
    return bool((request.get("stream_options") or {}).get("include_usage"))
