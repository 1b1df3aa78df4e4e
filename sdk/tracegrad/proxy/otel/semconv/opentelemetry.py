"""LLM spans by OpenTelemetry's own conventions for GenAI: read, from their first form to today's;
written in today's.

Texts stand, by age of the library, in the attributes INPUT and OUTPUT, in those of an event
DETAILS, in one event a message (MESSAGES, CHOICE), or in the events PROMPT_EVENT and
COMPLETION_EVENT, all of `genai_attributes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tracegrad import genai_attributes
from tracegrad.chat.messages import assistant_message
from tracegrad.events import Json, Span
from tracegrad.jsonutil import dump_json
from tracegrad.proxy.otel.semconv.chat_completion import (
    LlmCall,
    canonical_content,
    content_parts,
    first,
    function_tools,
    message_of,
    objects,
    parsed,
    request_of,
    response_of,
    role_of,
    tool_call,
    tool_message,
    url_part,
    usage_of,
)
from tracegrad.proxy.otel.semconv.flat_attributes import SpanEvent, events_of

CHAT = "chat"
LLM_OPERATIONS = frozenset({CHAT, "text_completion", "generate_content"})
INVOKE_AGENT = "invoke_agent"  # of spans around the calls

_SETTINGS = {
    "temperature": genai_attributes.TEMPERATURE,
    "top_p": genai_attributes.TOP_P,
    "top_k": (*genai_attributes.TOP_K, "llm.top_k"),
    "max_tokens": genai_attributes.MAX_TOKENS,
    "stop": (*genai_attributes.STOP, "llm.chat.stop_sequences"),
    "seed": genai_attributes.SEED,
    "n": genai_attributes.CHOICES,
    "presence_penalty": (*genai_attributes.PRESENCE_PENALTY, "llm.presence_penalty"),
    "frequency_penalty": (*genai_attributes.FREQUENCY_PENALTY, "llm.frequency_penalty"),
}


def read(span: Span) -> LlmCall:
    """Of an LLM span."""
    events = list(events_of(span))
    details = [event.attributes for event in events if event.name == genai_attributes.DETAILS]
    attributes = {**span.attributes, **(details[-1] if details else {})}
    messages = _instructions(attributes)
    for message in objects(attributes.get(genai_attributes.INPUT)):
        messages += _input(message)
    outputs = objects(attributes.get(genai_attributes.OUTPUT))
    if not messages:
        messages = _told_by_events(events)
    outputs = outputs or _choices(events)
    return call_of(
        attributes,
        messages=messages,
        tools=function_tools(parsed(attributes.get(genai_attributes.TOOLS))),
        replies=[_reply(output) for output in outputs],
        finish_reasons=[output.get("finish_reason") for output in outputs],
    )


def call_of(
    attributes: Mapping[str, Any],
    *,
    messages: list[Json],
    tools: list[Json],
    replies: list[Json],
    finish_reasons: list[Any],
) -> LlmCall:
    """The call with what stands in single attributes: model, settings, usage."""
    settings = {name: first(attributes, names) for name, names in _SETTINGS.items()}
    model = attributes.get(genai_attributes.REQUEST_MODEL)
    response = response_of(
        id=attributes.get(genai_attributes.RESPONSE_ID),
        model=attributes.get(genai_attributes.RESPONSE_MODEL) or model,
        replies=replies,
        finish_reasons=finish_reasons
        if any(finish_reasons)
        else _listed(first(attributes, genai_attributes.FINISH_REASONS)),
        usage=usage_of(
            first(attributes, genai_attributes.INPUT_TOKENS),
            first(attributes, genai_attributes.OUTPUT_TOKENS),
            cached=first(attributes, genai_attributes.CACHED_TOKENS),
            reasoning=first(attributes, genai_attributes.REASONING_TOKENS),
        ),
    )
    return LlmCall(request_of(model, messages, tools, settings), response)


def _instructions(attributes: Mapping[str, Any]) -> list[Json]:
    given = parsed(attributes.get(genai_attributes.INSTRUCTIONS))
    if not given:
        return []
    parts = given if isinstance(given, list) else [given]
    text, _, _ = _taken_apart(parts)
    return [{"role": "system", "content": text}] if text else []


def _input(message: Json) -> list[Json]:
    """A message of the conversation. Results of tools, which may stand beside one another or a
    text, are messages of their own."""
    if not isinstance(message.get("parts"), list):
        return [_plain(message)]
    parts = [part for part in message["parts"] if _kind(part) != "tool_call_response"]
    results = [part for part in message["parts"] if _kind(part) == "tool_call_response"]
    messages = [tool_message(each.get("id"), canonical_content(_result(each))) for each in results]
    if role_of(message.get("role")) == "assistant":
        return [*messages, _reply({**message, "parts": parts})]
    content, _, _ = _taken_apart(parts)
    if parts or not results:
        messages.append(message_of(message.get("role"), content, name=message.get("name")))
    return messages


def _reply(message: Json) -> Json:
    if not isinstance(message.get("parts"), list):
        return _plain({**message, "role": "assistant"})
    content, calls, reasoning = _taken_apart(message["parts"])
    return assistant_message(content, calls, reasoning)


def _taken_apart(parts: list[Any]) -> tuple[str | list[Json], list[Json], str]:
    """Content, tool calls and reasoning."""
    content: list[Any] = []
    calls: list[Json] = []
    reasoning: list[str] = []
    for part in parts:
        kind = _kind(part)
        if kind == "tool_call":
            calls.append(tool_call(part.get("id"), part.get("name"), part.get("arguments")))
        elif kind in ("reasoning", "thinking"):
            reasoning.append(str(part.get("content") or part.get("thinking") or ""))
        elif kind == "uri" and part.get("uri"):
            content.append(url_part(part.get("modality"), str(part["uri"])))
        elif kind == "blob" and part.get("content"):
            data = f"data:{part.get('mime_type') or ''};base64,{part['content']}"
            content.append(url_part(part.get("modality"), data))
        else:
            content.append(part)
    return canonical_content(content), calls, "\n".join(filter(None, reasoning))


def _kind(part: Any) -> str | None:
    return part.get("type") if isinstance(part, Mapping) else None


def _result(part: Json) -> Any:
    """`result` in the first drafts."""
    return part.get("response", part.get("result", part.get("content")))


def _plain(message: Mapping[str, Any]) -> Json:
    """A message as chat completions spell it, or nearly."""
    calls = [_plain_call(each) for each in objects(message.get("tool_calls"))]
    return message_of(
        message.get("role"),
        content_parts(message.get("content")),
        calls,
        tool_call_id=message.get("tool_call_id", message.get("id")),
        name=message.get("name"),
        reasoning=message.get("reasoning") or message.get("reasoning_content"),
    )


def _plain_call(call: Json) -> Json:
    function = call.get("function")
    inner = function if isinstance(function, Mapping) else call
    return tool_call(call.get("id"), inner.get("name"), inner.get("arguments"))


def _told_by_events(events: Iterable[SpanEvent]) -> list[Json]:
    messages: list[Json] = []
    for name, body in events:
        if name in genai_attributes.MESSAGES:
            messages.append(_plain({"role": genai_attributes.MESSAGES[name], **body}))
        elif name == genai_attributes.PROMPT_EVENT:
            messages += map(_plain, objects(body.get(genai_attributes.PROMPT)))
    return messages


def _choices(events: Iterable[SpanEvent]) -> list[Json]:
    """Messages with their `finish_reason`."""
    found: list[Json] = []
    for name, body in events:
        if name == genai_attributes.CHOICE:
            message = parsed(body.get("message"))
            inner: Json = message if isinstance(message, dict) else {"content": message}
            outer: Json = {"tool_calls": body.get("tool_calls")}
            found.append({**outer, **inner, "finish_reason": body.get("finish_reason")})
        elif name == genai_attributes.COMPLETION_EVENT:
            found += objects(body.get(genai_attributes.COMPLETION))
    return found


def _listed(reasons: Any) -> list[Any]:
    listed = parsed(reasons) if isinstance(reasons, str) and reasons.startswith("[") else reasons
    if listed is None:
        return []
    return list(listed) if isinstance(listed, list | tuple) else [listed]


def write(call: LlmCall) -> Json:
    """The attributes of an LLM span: what `read` makes the call of again. A choice whose `message`
    is None has texts that nobody knows."""
    response = call.response or {}
    usage = response.get("usage") or {}
    choices = response.get("choices") or []
    found: Json = {
        genai_attributes.OPERATION: CHAT,
        genai_attributes.REQUEST_MODEL: call.request.get("model"),
        genai_attributes.RESPONSE_MODEL: response.get("model"),
        genai_attributes.RESPONSE_ID: response.get("id"),
        genai_attributes.INPUT_TOKENS[0]: usage.get("prompt_tokens"),
        genai_attributes.OUTPUT_TOKENS[0]: usage.get("completion_tokens"),
        genai_attributes.FINISH_REASONS[0]: [
            reason for choice in choices if (reason := choice.get("finish_reason"))
        ],
        genai_attributes.INPUT: _texts(map(_message_parts, call.request["messages"])),
        genai_attributes.OUTPUT: _texts(
            _choice_parts(choice) for choice in choices if choice["message"]
        ),
        genai_attributes.TOOLS: _texts(
            each["function"] | {"type": "function"} for each in _functions(call)
        ),
        **{names[0]: call.sampling.get(name) for name, names in _SETTINGS.items()},
    }
    return {name: value for name, value in found.items() if value not in (None, "", [])}


def _texts(values: Iterable[Json]) -> str | None:
    listed = list(values)
    return dump_json(listed) if listed else None


def _functions(call: LlmCall) -> list[Json]:
    tools = objects(call.request.get("tools"))
    return [each for each in tools if isinstance(each.get("function"), dict)]


def _choice_parts(choice: Json) -> Json:
    message = _message_parts({**choice["message"], "role": "assistant"})
    return message | {"finish_reason": choice.get("finish_reason") or ""}


def _message_parts(message: Json) -> Json:
    content = message.get("content")
    if message.get("role") == "tool":
        call = {"type": "tool_call_response", "id": message.get("tool_call_id")}
        return {"role": "tool", "parts": [{**call, "response": content}]}
    parts: list[Json] = []
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": reasoning})
    for part in [content] if isinstance(content, str) else content or ():
        parts.append(_content_part(part))
    for call in message.get("tool_calls") or ():
        parts.append(_call_part(call))
    named = {"name": message["name"]} if message.get("name") else {}
    return {"role": message.get("role"), "parts": parts, **named}


def _content_part(part: Any) -> Json:
    if isinstance(part, str):
        return {"type": "text", "content": part}
    kind = str(part.get("type"))
    if kind == "text":
        return {"type": "text", "content": part.get("text")}
    url = part.get(kind)
    if kind.endswith("_url") and isinstance(url, dict) and isinstance(url.get("url"), str):
        return {"type": "uri", "modality": kind.removesuffix("_url"), "uri": url["url"]}
    return dict(part)


def _call_part(call: Json) -> Json:
    function = call.get("function") or {}
    arguments = parsed(function.get("arguments"))
    named = {"id": call.get("id"), "name": function.get("name")}
    return {"type": "tool_call", **named, "arguments": arguments}
