"""What the engine hands to a chat template: vLLM 0.32's reading of a chat completion request.

Messages, tools and template arguments as `renderers/chat_utils.py` and the request's own model
leave them; anything else would render another prompt than the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, get_args

import orjson

from tracegrad.events import Json

MediaKind = Literal["image", "audio", "video"]

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "thinking": "thinking",
    "refusal": "refusal",
}

# Claude Code's first line of system text: its value changes with every request.
_BILLING_LINE = "x-anthropic-billing-header"

# Fields by which a request makes the engine render otherwise, or not take our tokens.
_OWN_RENDERING = (
    *("chat_template", "continue_final_message", "add_special_tokens", "echo"),
    "truncate_prompt_tokens",
)


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What a prompt is rendered from besides its messages."""

    tools: list[Json] | None = None
    kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True

    @property
    def key(self) -> bytes:
        """16 bytes; equal frames have equal keys.

        Whether tools are strict is left out: the proxy may have asked for free ones, and what the
        template made of them is proven token by token.
        """
        tools = self.tools
        if isinstance(tools, list):  # a client may send any in its template's arguments
            tools = [without_strict(tool) for tool in tools]
        content = [tools, dict(self.kwargs or {}), self.add_generation_prompt]
        return blake2b(_dump(content), digest_size=16).digest()


def render_options(body: Json, defaults: Mapping[str, Any] | None = None) -> RenderOptions:
    """`body` is a chat completion request; `defaults` what the engine was started with
    (`--default-chat-template-kwargs`)."""
    asked: Json = dict(body.get("chat_template_kwargs") or {})
    effort = body.get("reasoning_effort")
    if effort is not None and "enable_thinking" not in asked:
        asked["enable_thinking"] = effort != "none"
    asked |= _set({"documents": body.get("documents"), "reasoning_effort": effort})
    kwargs = {**(defaults or {}), **_set(asked)}
    kwargs.pop("add_generation_prompt", None)
    own_tools = kwargs.pop("tools", None)
    return RenderOptions(
        tools=own_tools if own_tools is not None else engine_tools(body.get("tools")),
        kwargs=kwargs,
        add_generation_prompt=bool(body.get("add_generation_prompt", True)),
    )


def without_strict(tool: Any) -> Any:
    """A tool whose arguments are not held to its schema."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    return {**tool, "function": {k: v for k, v in function.items() if k != "strict"}}


def custom_rendering_field(body: Json) -> str | None:
    """The field of a request that makes the engine render it in a way of its own, if one does."""
    return next((name for name in _OWN_RENDERING if body.get(name)), None)


def engine_tools(tools: Sequence[Json] | None) -> list[Json] | None:
    """With the fields that vLLM keeps, in its order; a missing description becomes null."""
    return None if tools is None else [_tool(tool) for tool in tools]


def has_media(messages: Sequence[Json]) -> bool:
    """Whether a content holds anything but text."""
    return any(
        not isinstance(part, str)
        and not (isinstance(part, dict) and part.get("type") in _TEXT_PARTS)
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    )


def content_text(content: Any, *, joint: str = "\n") -> str:
    """A content as one string: text parts joined, None empty."""
    if isinstance(content, list):
        return joint.join(filter(None, map(_part_text, content)))
    return content if isinstance(content, str) else ""


def engine_message(message: Json, *, parts: bool) -> Json:
    """One message as the template gets it; its content is a list of parts if `parts`.

    Arguments of tool calls become objects: text that is no JSON object becomes an empty one.
    """
    role = message["role"]
    content = message.get("content")
    if role == "system":
        content = without_billing_line(content)
    shown: Json = {"role": role, "content": _parts(content) if parts else content_text(content)}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            shown["tool_calls"] = [_call(call) for call in calls]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            shown["reasoning"] = shown["reasoning_content"] = reasoning
    elif role == "tool":
        if parts:
            shown["content"] = _joined(shown["content"])
        if "tool_call_id" in message:
            shown["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        shown["tools"] = message.get("tools")
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            shown[name] = message[name]
    return shown


def developers_as_system(messages: Sequence[Json]) -> list[Json]:
    """For templates that know no such role: developers become the system, and all system text
    moves into one message at the front, unless it is there already."""
    if not any(message["role"] == "developer" for message in messages):
        return list(messages)
    renamed = [
        {**{k: v for k, v in message.items() if k != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    system = [message for message in renamed if message["role"] == "system"]
    if system == renamed[:1]:
        return renamed
    texts = [_joined(message["content"]) for message in system]
    joined: Json = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [joined, *(message for message in renamed if message["role"] != "system")]


def without_billing_line(content: Any) -> Any:
    """System content less the line that Claude Code puts before it, which vLLM drops."""
    if isinstance(content, str):
        return content.partition("\n")[2] if content.startswith(_BILLING_LINE) else content
    if not isinstance(content, list):
        return content
    kept = []
    for part in content:
        inner = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if inner else part
        if not (isinstance(text, str) and text.startswith(_BILLING_LINE)):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append({**part, "text": rest} if inner else rest)
    return kept


def _joined(content: str | list[Json]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def _parts(content: Any) -> list[Json]:
    if not isinstance(content, list):
        content = [] if content is None else [content]
    texts = (_part_text(part) for part in content)
    return [{"type": "text", "text": text} for text in texts if text is not None]


def _part_text(part: Any) -> str | None:
    if not isinstance(part, dict):
        return part if isinstance(part, str) else None
    text = part.get(_TEXT_PARTS.get(str(part.get("type")), "text"))
    return text if isinstance(text, str) else None


def _call(call: Json) -> Json:
    # Fields in the engine's order: a template may print a whole call.
    function = dict(call.get("function") or {})
    arguments = _object(function.pop("arguments", None))
    named = {"name": function.pop("name")} if "name" in function else {}
    shown: Json = {"id": call["id"]} if "id" in call else {}
    shown["function"] = {"arguments": arguments, **named, **function}
    return {**shown, "type": "function", **{k: v for k, v in call.items() if k not in shown}}


def _object(arguments: Any) -> Json:
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _tool(tool: Json) -> Json:
    function = tool.get("function") or {}
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    deferred = tool.get("defer_loading")
    inner = function.get("defer_loading") if function.get("defer_loading") is not None else deferred
    if inner is not None:
        shown["defer_loading"] = inner
    whole: Json = {"type": tool.get("type") or "function", "function": shown}
    if deferred is not None:
        whole["defer_loading"] = deferred
    return whole


def _set(values: Mapping[str, Any]) -> Json:
    """vLLM takes null and "auto" for "not given"."""
    return {name: value for name, value in values.items() if value not in (None, "auto")}


def _dump(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # integers beyond 64 bits, lone surrogates
        return json.dumps(value).encode()


def assistant_message(
    content: str | Sequence[Json], calls: Sequence[Json] = (), reasoning: str = ""
) -> Json:
    """Canonical; a message that says nothing has the content None."""
    message: Json = {"role": "assistant", "content": content or None}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def tool_call(call_id: str, name: str, arguments: str) -> Json:
    """Canonical: `arguments` as the model wrote them."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def media_kind(name: str) -> MediaKind | None:
    """Of a MIME type's first half, say."""
    return next((kind for kind in get_args(MediaKind) if kind == name), None)


def media_part(kind: MediaKind, url: str) -> Json:
    """`url` may be one with the data in it; `audio_url` and `video_url` are vLLM's."""
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def content_of(parts: Sequence[Json]) -> str | list[Json]:
    """Text parts alone are one string, as vLLM makes them for templates that take strings."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return list(parts)


def media_untrainable_reason(messages: Sequence[Json]) -> Literal["media"] | None:
    """Why a turn with these messages must not be trained, or None. Of canonical messages."""
    return "media" if has_media(messages) else None
