"""Anthropic's Messages API: requests into canonical calls (Claude Code speaks it).

The field names are those of the `anthropic` package, 2.10. Unknown ones are refused, as the
vendor does. How long a model thinks is its own affair: a thinking budget has no effect, since
vLLM could keep to it only by cutting thoughts short, and such tokens cannot be trained.

Conversation: consecutive messages of one role are one turn, as the vendor has it. Of a user turn,
the tool results come first, one `tool` message each; of an assistant turn, text, thinking and
tool calls are three fields, so their order among each other is not kept. `is_error`, citations
and signatures are read by no chat template and have no effect; nor has `redacted_thinking`,
which no other model can read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import orjson

from tracegrad.chat.call import Call, VisibleFields
from tracegrad.chat.messages import (
    assistant_message,
    content_of,
    media_part,
    media_untrainable_reason,
    text_part,
    tool_call,
    without_billing_line,
)
from tracegrad.events import Json
from tracegrad.proxy.dialects import tool_arguments
from tracegrad.proxy.dialects.anthropic import response as output
from tracegrad.proxy.dialects.anthropic.stream import AnthropicStreamWriter
from tracegrad.proxy.dialects.anthropic.tools import AnthropicTools, read_choice, read_tools
from tracegrad.proxy.dialects.body_checks import json_object
from tracegrad.proxy.dialects.json_field import JsonField
from tracegrad.proxy.http.errors import ApiError, BadRequest

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
    return Call(
        dialect=NAME,
        request=request,
        body=body,
        stream=given.is_set("stream"),
        visible=VisibleFields(reasoning=_thinking(given) != "disabled"),
        untrainable=media_untrainable_reason(body["messages"]),
        tool_call_prefix="toolu_",
    )


def _conversation(given: JsonField) -> Json:
    """What the prompt is made of."""
    given.refuse_all_but(_SERVED, _REFUSED)
    model = given.require("model").some_text()
    tools = read_tools(given.get("tools"))
    body: Json = {
        "model": model,
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
        body["stop"] = stops.stop_strings()
    for name in _VLLMS:
        if (field := given.get(name)) is not None:
            body[name] = field.value
    return body


def _check_edits(management: JsonField) -> None:
    """Of earlier thoughts a chat template keeps what it keeps; other edits are the client's."""
    for edit in management.items_of("edits"):
        kind = edit.require("type")
        if not kind.text().startswith("clear_thinking_"):
            raise kind.error(
                f"is {kind.text()[:60]!r}, which is not served; the client has to shorten its "
                "conversation itself"
            )


_NO_TOOL_CHANGES = "mid_conversation_tool_changes_not_supported"

_BELONGS = {
    "tool_use": "assistant",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_result": "user",
    "image": "user",
}


def system_of(given: JsonField | None) -> list[Json]:
    """The system message of the field `system`; none where it says nothing."""
    text = _system_text(given) if given else ""
    return [{"role": "system", "content": text}] if text else []


def messages_of(given: JsonField, tools: AnthropicTools) -> list[Json]:
    messages: list[Json] = []
    items = given.items()
    if not items:
        raise given.error("is empty")
    for role, turn in groupby(items, key=_role):
        if role == "assistant":
            messages.append(_assistant(_blocks(turn, role)))
        elif role == "user":
            messages += _user(_blocks(turn, role), tools)
        else:
            messages += filter(None, map(_system_inside, turn))
    return messages


def refuse_prefill(given: JsonField) -> None:
    """A conversation that is to be answered ends with a user's message, or system text."""
    last = given.items()[-1]
    if _role(last) == "assistant":
        raise last.error(
            "is an assistant message, and it is the last: assistant message prefill is not "
            "supported; the conversation must end with a user message"
        )


def _role(message: JsonField) -> str:
    return message.require("role").one_of(("user", "assistant", "system"))


def _blocks(turn: Iterator[JsonField], role: str) -> Iterator[tuple[str, JsonField]]:
    """The turn's content blocks, each with its type."""
    for message in turn:
        content = message.require("content")
        if isinstance(content.value, str):
            yield "text", JsonField({"text": content.value}, message, "content")
            continue
        for block in content.items():
            kind = block.require("type").text()
            if (owner := _BELONGS.get(kind, role)) != role:
                raise block.error(f"is of type {kind!r}, which belongs in messages of the {owner}")
            yield kind, block


def _assistant(blocks: Iterator[tuple[str, JsonField]]) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for kind, block in blocks:
        if kind == "text":
            texts.append(block.require("text").text())
        elif kind == "thinking":
            thoughts.append(block.require("thinking").text())
        elif kind == "tool_use":
            calls.append(_tool_call(block))
        elif kind != "redacted_thinking":
            raise _not_served(block, kind)
    return assistant_message("".join(texts), calls, "".join(thoughts))


def _tool_call(block: JsonField) -> Json:
    # The vendor takes objects alone; its own SDK makes other things of what models write.
    if "input" not in block.object():
        raise JsonField(None, block, "input").error("is missing")
    arguments = tool_arguments.as_text(block.object()["input"])
    return tool_call(block.require("id").text(), block.require("name").text(), arguments)


def _user(blocks: Iterator[tuple[str, JsonField]], tools: AnthropicTools) -> Iterator[Json]:
    results: list[Json] = []
    parts: list[Json] = []
    for kind, block in blocks:
        if kind == "tool_result":
            results.append(_result(block, tools))
        else:
            parts.append(_part(kind, block))
    yield from results
    if parts or not results:
        yield {"role": "user", "content": content_of(parts)}


def _result(block: JsonField, tools: AnthropicTools) -> Json:
    block.is_set("is_error")  # read for its type alone
    content = block.get("content")
    parts: list[Json] = []
    if content is not None and isinstance(content.value, str):
        parts = [text_part(content.value)]
    elif content is not None:
        for inner in content.items():
            kind = inner.require("type").text()
            is_reference = kind == "tool_reference"
            parts.append(text_part(tools.definition(inner)) if is_reference else _part(kind, inner))
    return {
        "role": "tool",
        "tool_call_id": block.require("tool_use_id").text(),
        "content": content_of(parts),
    }


def _part(kind: str, block: JsonField) -> Json:
    if kind == "text":
        return text_part(block.require("text").text())
    if kind == "image":
        return media_part("image", _image(block.require("source")))
    raise _not_served(block, kind)


def _image(source: JsonField) -> str:
    kind = source.require("type").text()
    if kind == "url":
        return source.require("url").text()
    if kind == "base64":
        data, media_type = source.require("data").text(), source.require("media_type").text()
        return f"data:{media_type};base64,{data}"
    raise source.error(f"is of type {kind[:60]!r}; served are base64 and url")


def _system_inside(message: JsonField) -> Json | None:
    """Where it stands: a template that knows no such place refuses it, and the client
    gets the refusal."""
    if (clear_at := message.get("clear_at")) is not None:
        clear_at.one_of(("never",))
    message.refuse_all_but(
        ("role", "content", "clear_at"), {"output_config": "set it for the whole request"}
    )
    text = _system_text(message.require("content"))
    return {"role": "system", "content": text} if text else None


def _system_text(given: JsonField) -> str:
    if isinstance(given.value, str):
        return str(without_billing_line(given.value))
    texts = []
    for block in given.items():
        kind = block.require("type").text()
        if kind in ("tool_addition", "tool_removal"):
            raise block.error(
                f"is of type {kind!r}, which is not served: change tools instead",
                code=_NO_TOOL_CHANGES,
            )
        if kind != "text":
            raise _not_served(block, kind)
        texts.append(without_billing_line(block.require("text").text()))
    return "\n".join(text for text in texts if text)


def _not_served(block: JsonField, kind: str) -> BadRequest:
    return block.error(f"is of type {kind[:60]!r}, and blocks of that type are not served here")
