"""Anthropic's Messages API: requests into canonical calls (Claude Code speaks it).

The field names are those of the `anthropic` package, 2.10. Unknown ones are refused, as the
vendor does. How long a model thinks is its own affair: a thinking budget has no effect, since
vLLM could keep to it only by cutting thoughts short, and such tokens cannot be trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from tracegrad.chat.content_parts import media_untrainable_reason
from tracegrad.events import Json
from tracegrad.proxy.dialects.anthropic import response as output
from tracegrad.proxy.dialects.anthropic.conversation import messages_of, refuse_prefill, system_of
from tracegrad.proxy.dialects.anthropic.stream import AnthropicStreamWriter
from tracegrad.proxy.dialects.anthropic.tools import read_choice, read_tools
from tracegrad.proxy.dialects.base import Call, VisibleFields
from tracegrad.proxy.dialects.body_checks import json_object
from tracegrad.proxy.dialects.json_field import JsonField
from tracegrad.proxy.http.errors import ApiError

NAME = "messages"

# vLLM's own fields of chat completions, which it judges itself.
_VLLMS = ("seed", "structured_outputs", "vllm_xargs")

_SERVED = frozenset(
    (
        "model",
        "messages",
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
        "output_format",
        "context_management",
        "chat_template_kwargs",
        *_VLLMS,
        "max_tokens",
        "stream",
        "stop_sequences",
        "temperature",
        "top_p",
        "top_k",
        # Accounts, caching, storage and speed at the vendor: no effect.
        "betas",
        "billing_policy",
        "cache_control",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    )
)
_REFUSED = {
    "compaction": "the client has to sum up its conversation itself",
    "container": "there is no code execution here",
    "mcp_servers": "list the servers' tools under tools, and call them from the client",
    "thread": "send the whole conversation",
}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


class AnthropicDialect:
    name = NAME

    def parse(self, raw: bytes, path: Mapping[str, Any], query: Mapping[str, str]) -> Call:
        request = json_object(raw)
        given = JsonField(request)
        body = _conversation(given)
        refuse_prefill(given.require("messages"))
        body["max_tokens"] = given.require("max_tokens").integer(1)
        body.update(_sampling(given))
        return _call(request, body, given)

    def answer(self, call: Call, answer: Json) -> bytes:
        return output.whole_message(call, answer)

    def writer(self, call: Call) -> AnthropicStreamWriter:
        return AnthropicStreamWriter(call)

    def error(self, error: ApiError) -> bytes:
        return output.error_body(error)


def count_request(raw: bytes, path: Mapping[str, Any]) -> Call:
    """`POST /v1/messages/count_tokens`: a call that is only to be rendered and counted.

    Raises BadRequest.
    """
    request = json_object(raw)
    given = JsonField(request)
    return _call(request, _conversation(given), given)


def count_answer(tokens: int) -> bytes:
    return orjson.dumps({"input_tokens": tokens})


def _call(request: Json, body: Json, given: JsonField) -> Call:
    stream = given.get("stream")
    return Call(
        dialect=NAME,
        request=request,
        body=body,
        stream=stream is not None and stream.flag(),
        visible=VisibleFields(reasoning=_thinking(given) != "disabled"),
        untrainable=media_untrainable_reason(body["messages"]),
    )


def _conversation(given: JsonField) -> Json:
    """What the prompt is made of."""
    given.refuse_all_but(_SERVED, _REFUSED)
    model = given.require("model")
    if not model.text():
        raise model.error("is empty")
    tools = read_tools(given.get("tools"))
    body: Json = {
        "model": model.text(),
        "messages": system_of(given.get("system")) + messages_of(given.require("messages"), tools),
    }
    if tools.visible:
        body["tools"] = tools.visible
    body.update(read_choice(given.get("tool_choice"), tools))
    body.update(_effort(given))
    if (kwargs := given.get("chat_template_kwargs")) is not None:
        body["chat_template_kwargs"] = kwargs.object()
    if (management := given.get("context_management")) is not None:
        _check_edits(management)
    return body


def _thinking(given: JsonField) -> str | None:
    """The type of `thinking`.

    Thoughts are shown unless it is "disabled": clients may send them back, and those that chose
    `display: "omitted"` (Claude Code does) get them too, for there is nobody here who keeps what
    a signature would stand for.
    """
    thinking = given.get("thinking")
    if thinking is None:
        return None
    kind = thinking.require("type").one_of(("adaptive", "disabled", "enabled"))
    if kind == "enabled":
        thinking.require("budget_tokens").integer(0)
    return kind


def _effort(given: JsonField) -> Json:
    """`output_config`, and thinking that is turned off, in vLLM's fields."""
    body: Json = {}
    config = given.get("output_config")
    output_format = given.get("output_format")
    if config is not None:
        config.refuse_all_but(("effort", "format"))
        if (effort := config.get("effort")) is not None:
            body["reasoning_effort"] = effort.one_of(_EFFORTS)
        output_format = config.get("format") or output_format
    if _thinking(given) == "disabled":
        body["reasoning_effort"] = "none"
    if output_format is not None:
        output_format.require("type").one_of(("json_schema",))
        schema = output_format.require("schema").object()
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        }
    return body


def _sampling(given: JsonField) -> Json:
    body: Json = {}
    for name in ("temperature", "top_p"):
        if (field := given.get(name)) is not None:
            body[name] = field.number()
    if (top_k := given.get("top_k")) is not None:
        body["top_k"] = top_k.integer()
    if (stops := given.get("stop_sequences")) is not None and stops.texts():
        if "" in stops.texts():
            raise stops.error("has an empty string in it")
        body["stop"] = stops.texts()
    for name in _VLLMS:
        if (field := given.get(name)) is not None:
            body[name] = field.value
    return body


def _check_edits(management: JsonField) -> None:
    """Of earlier thoughts a chat template keeps what it keeps; other edits are the client's."""
    edits = management.get("edits")
    for edit in edits.items() if edits else ():
        kind = edit.require("type")
        if not kind.text().startswith("clear_thinking_"):
            raise kind.error(
                f"is {kind.text()[:60]!r}, which is not served; the client has to shorten its "
                "conversation itself"
            )
