"""What Anthropic's clients read: a whole message, its stop reason and usage, and errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

from tracegrad.chat.call import Call
from tracegrad.events import Json
from tracegrad.proxy.dialects import tool_arguments
from tracegrad.proxy.http.errors import CONTEXT_LENGTH_EXCEEDED, ApiError

_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}

# How vLLM and its chat templates say these.
_PROMPT_TOKENS = re.compile(r"contains (?:at least )?(\d+) input tokens|Input length \((\d+)\)")

_MOST_TOKENS = re.compile(r"maximum context length (?:is |\()(\d+)")

_NO_SYSTEM_HERE = re.compile(
    r"system message must be|system role not supported|roles must alternate"
    r"|only user and assistant roles|unexpected message role",
    re.IGNORECASE,
)


def whole_message(call: Call, answer: Json) -> bytes:
    choice = answer["choices"][0]
    message = choice["message"]
    calls = message.get("tool_calls") or []
    arguments = [call["function"].get("arguments") or "" for call in calls]
    reason, sequence = stop_reason(choice, arguments)
    return orjson.dumps(
        {
            **message_start(call),
            "content": _content(call, message),
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage_of(answer.get("usage")),
        }
    )


def message_start(call: Call) -> Json:
    """A message with nothing in it, under the name that the client gave the model."""
    return {
        "id": f"msg_{call.turn_id}",
        "type": "message",
        "role": "assistant",
        "model": call.body["model"],
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def signature(call: Call) -> str:
    """Of a thinking block. Clients send it back; it has no effect then."""
    return call.turn_id


def stop_reason(choice: Json, arguments: Sequence[str]) -> tuple[str, str | None]:
    """The `stop_reason` and `stop_sequence` of a message with tool calls of these arguments.

    A tool call that is complete is to be run even if a stop string ended what came after it,
    and also where the engine says "stop", as vLLM does for a call that was forced.
    """
    finish, hit = choice.get("finish_reason"), choice.get("stop_reason")
    if finish in ("length", "abort"):
        return "max_tokens", None
    if finish == "content_filter":
        return "refusal", None
    is_cut = isinstance(hit, str)
    if arguments and not (is_cut and not tool_arguments.is_object(arguments[-1])):
        return "tool_use", None
    return ("stop_sequence", hit) if is_cut else ("end_turn", None)


def usage_of(usage: Any) -> Json:
    """`input_tokens` leaves out those that were in the engine's prefix cache."""
    usage = usage or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": max((usage.get("prompt_tokens") or 0) - cached, 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.get("completion_tokens") or 0,
    }


def error_body(error: ApiError) -> bytes:
    return orjson.dumps({"type": "error", "error": error_object(error)})


def error_object(error: ApiError) -> Json:
    kind = _ERROR_TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    message, code = error.message, error.code
    if code == CONTEXT_LENGTH_EXCEEDED:
        message = _too_long(message)
    elif error.status == 400 and _NO_SYSTEM_HERE.search(message):
        code = NO_SYSTEM_INSIDE
        message += " (role 'system' inside messages is not supported by this chat template)"
    body: Json = {"type": kind, "message": message}
    if code and code.startswith("mid_conversation_"):
        body["details"] = {"error_code": code}
    return body


def _too_long(message: str) -> str:
    """As Claude Code reads it."""
    prompt, most = _PROMPT_TOKENS.search(message), _MOST_TOKENS.search(message)
    if prompt and most:
        return f"prompt is too long: {prompt[1] or prompt[2]} tokens > {most[1]} maximum"
    return f"prompt is too long: {message}"


def _content(call: Call, message: Json) -> list[Json]:
    blocks: list[Json] = []
    if call.visible.reasoning and (thought := message.get("reasoning")):
        blocks.append({"type": "thinking", "thinking": thought, "signature": signature(call)})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    blocks += [
        {
            "type": "tool_use",
            "id": tool["id"],
            "name": tool["function"]["name"],
            "input": tool_arguments.as_object(tool["function"].get("arguments") or ""),
        }
        for tool in message.get("tool_calls") or ()
    ]
    return blocks


# Codes that Claude Code knows: it sends the same in another form, and goes on.
NO_SYSTEM_INSIDE = "mid_conversation_system_not_supported"
