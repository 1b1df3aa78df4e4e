"""What litellm takes and gives, against the canonical form: pure functions on JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracegrad.events import Json
from tracegrad.proxy.http.errors import BadRequest

# OpenAI's fields that litellm translates, or refuses for models that have no such thing. No
# others: its own keywords (api_base, mock_response, ...) stand among them, and a client that
# could set those could send our key to a server of its choice.
FIELDS = frozenset(
    {
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "n",
        "parallel_tool_calls",
        "presence_penalty",
        "reasoning_effort",
        "response_format",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "verbosity",
    }
)
_USAGE = (
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "prompt_tokens_details",
    "completion_tokens_details",
)
_HEAD = ("id", "object", "created", "model")


def completion_kwargs(body: Json) -> Json:
    """A canonical body as keywords of `litellm.acompletion`. Raises BadRequest for others."""
    given: Json = {}
    for name, value in body.items():
        if value is None or name in ("model", "messages"):
            continue
        if name not in FIELDS:
            raise BadRequest(
                f"{name}: the model behind this proxy is reached through litellm, which has no"
                " such field; leave it out",
                param=name,
            )
        given[name] = value
    return {**given, "messages": [_sent(message) for message in body["messages"]]}


def chat_completion(answer: Json) -> Json:
    """A `chat.completion` in canonical form."""
    choices = [
        {**_rest_of(choice), "message": _said(choice["message"])} for choice in answer["choices"]
    ]
    return {**_head(answer), "choices": choices, "usage": _usage(answer.get("usage"))}


def chat_completion_chunk(part: Json) -> Json:
    """A `chat.completion.chunk` in canonical form; usage comes in one without choices."""
    usage = _usage(part.get("usage"))
    choices = [
        {**_rest_of(choice), "delta": _said(choice.get("delta") or {})}
        for choice in part["choices"]
    ]
    if usage is None:
        return {**_head(part), "choices": choices}
    says = [choice for choice in choices if choice["delta"] or choice["finish_reason"]]
    return {**_head(part), "choices": says, "usage": usage}


def finishes(part: Json) -> bool:
    return any(choice.get("finish_reason") for choice in part["choices"])


def _sent(message: Json) -> Json:
    # Providers want earlier reasoning signed by themselves, or not at all, and many refuse a
    # message with fields that they do not know.
    return {name: value for name, value in message.items() if name != "reasoning"}


def _head(answer: Json) -> Json:
    return {name: answer.get(name) for name in _HEAD}


def _rest_of(choice: Json) -> Json:
    return {
        "index": choice.get("index") or 0,
        "logprobs": choice.get("logprobs"),
        "finish_reason": choice.get("finish_reason"),
        "stop_reason": None,
    }


def _said(message: Mapping[str, Any]) -> Json:
    """A message or a delta, without what the provider left empty."""
    said: Json = {}
    for theirs, ours in (
        ("role", "role"),
        ("content", "content"),
        ("reasoning_content", "reasoning"),
    ):
        if message.get(theirs):
            said[ours] = message[theirs]
    if calls := message.get("tool_calls"):
        said["tool_calls"] = [_tool_call(call) for call in calls]
    return said


def _tool_call(call: Json) -> Json:
    """Pieces after the first of a call have neither id nor name."""
    function = {name: value for name, value in call["function"].items() if value is not None}
    kept = {name: call[name] for name in ("index", "id", "type") if call.get(name) is not None}
    return {**kept, "function": function}


def _usage(usage: Json | None) -> Json | None:
    if not usage:
        return None
    return {name: usage[name] for name in _USAGE if usage.get(name) is not None}
