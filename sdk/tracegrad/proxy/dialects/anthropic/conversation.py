"""The conversation of an Anthropic Messages request as canonical messages.

Messages of one role that follow each other are one turn, as the vendor has it. Of a user turn,
the tool results come first, one `tool` message each; of an assistant turn, text, thinking and
tool calls are three fields, so their order among each other is not kept. `is_error`, citations
and signatures are read by no chat template and have no effect; nor has `redacted_thinking`,
which no other model can read.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from tracegrad.chat.content_parts import content_of, media_part, text_part
from tracegrad.events import Json
from tracegrad.proxy.dialects import tool_arguments
from tracegrad.proxy.dialects.anthropic.tools import AnthropicTools
from tracegrad.proxy.dialects.json_field import JsonField
from tracegrad.proxy.http.errors import BadRequest

# Codes that Claude Code knows: it sends the same in another form, and goes on.
NO_SYSTEM_INSIDE = "mid_conversation_system_not_supported"
_NO_TOOL_CHANGES = "mid_conversation_tool_changes_not_supported"

# A line of Claude Code's that is for Anthropic's accounts and says other things in each call;
# vLLM takes it out too.
_BILLING = "x-anthropic-billing-header"

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
            calls.append(_call(block))
        elif kind != "redacted_thinking":
            raise _not_served(block, kind)
    message: Json = {"role": "assistant", "content": "".join(texts) or None}
    if reasoning := "".join(thoughts):
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: JsonField) -> Json:
    # The vendor takes objects alone; its own SDK makes other things of what models write.
    if "input" not in block.object():
        raise JsonField(None, block, "input").error("is missing")
    return {
        "id": block.require("id").text(),
        "type": "function",
        "function": {
            "name": block.require("name").text(),
            "arguments": tool_arguments.as_text(block.object()["input"]),
        },
    }


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
    if (failed := block.get("is_error")) is not None:
        failed.flag()
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
    """Where it stands: a template that knows no such place refuses it, and the client is told."""
    if (clear_at := message.get("clear_at")) is not None:
        clear_at.one_of(("never",))
    message.refuse_all_but(
        ("role", "content", "clear_at"), {"output_config": "set it for the whole request"}
    )
    text = _system_text(message.require("content"))
    return {"role": "system", "content": text} if text else None


def _system_text(given: JsonField) -> str:
    if isinstance(given.value, str):
        return _without_billing(given.value)
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
        texts.append(_without_billing(block.require("text").text()))
    return "\n".join(text for text in texts if text)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _not_served(block: JsonField, kind: str) -> BadRequest:
    return block.error(f"is of type {kind[:60]!r}, and blocks of that type are not served here")
