"""LLM spans of Traceloop's OpenLLMetry before it took to OpenTelemetry's conventions.

Every message is an attribute a field: `gen_ai.prompt.0.role`, `gen_ai.completion.0.content`,
`gen_ai.completion.0.tool_calls.0.name`, `llm.request.functions.0.parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracegrad import genai_attributes
from tracegrad.events import Json, Span
from tracegrad.proxy.otel.semconv import opentelemetry
from tracegrad.proxy.otel.semconv.chat_completion import (
    LlmCall,
    content_parts,
    function_tools,
    message_of,
    tool_call,
)
from tracegrad.proxy.otel.semconv.flat_attributes import in_index_order, unflatten

REQUEST_TYPE = "llm.request.type"
LLM_TYPES = frozenset({"chat", "completion"})

_FUNCTIONS = "llm.request.functions"


def is_flat(attributes: Mapping[str, Any]) -> bool:
    """Whether messages stand in attributes of their own."""
    return any(
        name.startswith((genai_attributes.PROMPT + ".0", genai_attributes.COMPLETION + ".0"))
        for name in attributes
    )


def read(span: Span) -> LlmCall:
    attributes = span.attributes
    completions = in_index_order(unflatten(attributes, genai_attributes.COMPLETION))
    return opentelemetry.call_of(
        attributes,
        messages=[
            _message(each)
            for each in in_index_order(unflatten(attributes, genai_attributes.PROMPT))
        ],
        tools=function_tools(in_index_order(unflatten(attributes, _FUNCTIONS))),
        replies=[_message({**each, "role": "assistant"}) for each in completions],
        finish_reasons=[each.get("finish_reason") for each in completions],
    )


def _message(entry: Json) -> Json:
    calls = [
        tool_call(each.get("id"), each.get("name"), each.get("arguments"))
        for each in in_index_order(entry.get("tool_calls"))
    ]
    return message_of(
        entry.get("role") or ("assistant" if calls else "user"),
        content_parts(entry.get("content")),
        calls,
        tool_call_id=entry.get("tool_call_id"),
        reasoning=entry.get("reasoning"),
    )
