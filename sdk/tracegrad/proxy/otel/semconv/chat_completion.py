"""LLM calls that others tell of, in the words of a chat completion."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tracegrad.chat.messages import assistant_message, content_of, media_kind, media_part, text_part
from tracegrad.events import Json
from tracegrad.jsonutil import dump_json
from tracegrad.proxy.dialects.body_checks import check_types
from tracegrad.proxy.dialects.openai_chat import FIELD_TYPES, check_common
from tracegrad.proxy.http.errors import BadRequest

# What vendors and conventions call it, as a chat completion does.
_FINISH_REASONS = {
    **dict.fromkeys(("end_turn", "stop_sequence", "complete", "completed", "eos"), "stop"),
    **dict.fromkeys(("max_tokens", "max_output_tokens", "incomplete"), "length"),
    **dict.fromkeys(("tool_call", "tool_use", "tool_calls", "function_call"), "tool_calls"),
    **dict.fromkeys(("safety", "refusal", "content_filter"), "content_filter"),
}
# Of a chat completion request, what is no wish about its sampling.
_REQUEST_FIELDS = frozenset({"model", "messages", "tools"})


@dataclass(frozen=True, slots=True)
class LlmCall:
    """`request` and `response` are those of a chat completion, as far as they were reported.

    `request["messages"]` is empty, and a choice's message without content, where the client's
    library keeps texts to itself. `response` is None for a call without an answer.
    """

    request: Json
    response: Json | None

    @property
    def model(self) -> str:
        """That answered; else the one that was asked for."""
        return str((self.response or {}).get("model") or self.request.get("model") or "")

    @property
    def response_id(self) -> str | None:
        """The server's own name for its answer."""
        return (self.response or {}).get("id")

    @property
    def reply(self) -> Json | None:
        """What the model said; of several choices the first."""
        choices = (self.response or {}).get("choices")
        return choices[0]["message"] if choices else None

    @property
    def finish_reason(self) -> str | None:
        choices = (self.response or {}).get("choices") or [{}]
        reason: str | None = choices[0].get("finish_reason")
        return reason

    @property
    def sampling(self) -> Json:
        """The settings that were reported; there may have been others."""
        return {name: value for name, value in self.request.items() if name not in _REQUEST_FIELDS}


def request_of(
    model: object, messages: Sequence[Json], tools: Sequence[Json], settings: Mapping[str, Any]
) -> Json:
    """Settings that are None were not reported; those that no request can have are left out."""
    request: Json = {"model": str(model or ""), "messages": list(messages)}
    if tools:
        request["tools"] = list(tools)
    return request | {name: value for name, value in settings.items() if _can_be(name, value)}


def _can_be(name: str, value: Any) -> bool:
    if value is None:
        return False
    try:
        check_types({name: value}, FIELD_TYPES)
        check_common({name: value})
    except BadRequest:
        return False
    return True


def response_of(
    *,
    id: object,
    model: object,
    replies: Sequence[Json],
    finish_reasons: Sequence[object],
    usage: Json,
) -> Json | None:
    """None where no answer was reported. `usage` as `usage_of` makes it."""
    if not (replies or id or usage or any(finish_reasons)):
        return None
    messages = replies or [{"role": "assistant", "content": None}]
    reasons = [finish_reason(reason) for reason in finish_reasons]
    reasons += [None] * (len(messages) - len(reasons))
    response: Json = {"id": str(id)} if id else {}
    response |= {"object": "chat.completion", "model": str(model or "")}
    response["choices"] = [
        {"index": index, "message": message, "finish_reason": reasons[index]}
        for index, message in enumerate(messages)
    ]
    return response | ({"usage": usage} if usage else {})


def usage_of(
    prompt: object, completion: object, *, cached: object = None, reasoning: object = None
) -> Json:
    """Counts of tokens; empty where neither the prompt's nor the completion's is reported."""
    counts = [whole_number(each) for each in (prompt, completion, cached, reasoning)]
    if counts[0] is None and counts[1] is None:
        return {}
    asked, said = counts[0] or 0, counts[1] or 0
    usage: Json = {
        "prompt_tokens": asked,
        "completion_tokens": said,
        "total_tokens": asked + said,
    }
    if counts[2]:
        usage["prompt_tokens_details"] = {"cached_tokens": counts[2]}
    if counts[3]:
        usage["completion_tokens_details"] = {"reasoning_tokens": counts[3]}
    return usage


def finish_reason(reason: object) -> str | None:
    if not reason:
        return None
    reason = str(reason).lower()
    return _FINISH_REASONS.get(reason, reason)


def tool_call(id: object, name: object, arguments: object) -> Json:
    """One call in a reply. Arguments that are no text become JSON."""
    text = arguments if isinstance(arguments, str) else dump_json(arguments or {})
    call: Json = {"id": str(id)} if id else {}
    return {**call, "type": "function", "function": {"name": str(name or ""), "arguments": text}}


def tool_message(id: object, content: str | list[Json]) -> Json:
    return {"role": "tool", "tool_call_id": str(id or ""), "content": content}


def message_of(role: object, content: Any, calls: Sequence[Json] = (), **more: Any) -> Json:
    """A message of any role. `content` as chat completions, or vendors, spell it; `more`:
    tool_call_id, name, reasoning."""
    name = role_of(role)
    said = canonical_content(content)
    if name == "assistant":
        return assistant_message(said, calls, str(more.get("reasoning") or ""))
    if name == "tool":
        return tool_message(more.get("tool_call_id"), said)
    named: Json = {"name": str(more["name"])} if more.get("name") else {}
    return {"role": name, **named, "content": said}


def role_of(named: object) -> str:
    role = str(named or "user").lower()
    return {"human": "user", "ai": "assistant", "model": "assistant", "function": "tool"}.get(
        role, role
    )


def canonical_content(content: Any) -> str | list[Json]:
    """A content as canonical messages have it: a text, or parts where there is more than text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list):
        return dump_json(content)
    return content_of([_part(each) for each in content])


def _part(part: Any) -> Json:
    if isinstance(part, str):
        return text_part(part)
    if not isinstance(part, Mapping):
        return text_part(dump_json(part))
    kind = part.get("type")
    text = part.get("text", part.get("content"))
    if kind in (None, "text", "input_text", "output_text", "refusal") and isinstance(text, str):
        return text_part(text)
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return text_part(part["refusal"])
    return {**part, "type": str(kind)} if kind else text_part(dump_json(dict(part)))


def url_part(modality: object, url: str) -> Json:
    kind = media_kind(str(modality or "image"))
    return media_part(kind, url) if kind else {"type": "file", "file": {"file_data": url}}


def function_tool(definition: Any) -> Json | None:
    """A tool's definition, however flat it is; None for what is none."""
    if not isinstance(definition, Mapping):
        return None
    inner = definition.get("function")
    function = inner if isinstance(inner, Mapping) else definition
    name = function.get("name")
    if not isinstance(name, str) or not name:
        return None
    made: Json = {"name": name}
    if function.get("description"):
        made["description"] = str(function["description"])
    schemas = (function.get(key) for key in ("parameters", "input_schema", "inputSchema"))
    schema = parsed(next((each for each in schemas if each), None))
    if isinstance(schema, Mapping):
        made["parameters"] = dict(schema)
    return {"type": "function", "function": made}


def function_tools(definitions: Any) -> list[Json]:
    given = definitions if isinstance(definitions, list) else []
    return [tool for tool in map(function_tool, map(parsed, given)) if tool is not None]


def parsed(value: Any) -> Any:
    """JSON within a text as what it says; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(value, parse_constant=str)  # NaN, lone surrogates
    except (ValueError, RecursionError):
        return value


def content_parts(content: Any) -> Any:
    """A content; a text that is a JSON list of parts, as some libraries write it, as that list."""
    is_list = isinstance(content, str) and content.startswith("[{") and objects(content)
    return parsed(content) if is_list else content


def objects(value: Any) -> list[Json]:
    """The objects of a list, in JSON or as values; one alone is a list of it."""
    entries = parsed(value)
    if isinstance(entries, Mapping):
        entries = [entries]
    if not isinstance(entries, list):
        return []
    return [each for each in map(parsed, entries) if isinstance(each, dict)]


def whole_number(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if abs(value) < 2**53 else None  # neither for NaN


def first(values: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The value of the first name that has one; None."""
    return next((values[name] for name in names if values.get(name) is not None), None)
