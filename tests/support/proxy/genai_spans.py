"""One LLM call as each library's span tells of it, and as chat completions have it."""

from __future__ import annotations

import json
from typing import Any

from tracegrad.events import Span
from tracegrad.proxy.otel.semconv.flat_attributes import EVENTS, as_attribute

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city":"Ulm"}'},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
# What every library below tells of, each in its own words.
REQUEST = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain in Ulm."},
    ],
    "tools": [TOOL],
    "temperature": 0.5,
    "max_tokens": 9,
}
RESPONSE = {
    "id": "a1",
    "object": "chat.completion",
    "model": "m-2",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Yes.", "reasoning": "Wet."},
            "finish_reason": "stop",
        }
    ],
    "usage": {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
}


def span(
    attributes: dict[str, Any], events: list[tuple[str, dict[str, Any]]] | None = None
) -> Span:
    kept = [as_attribute(name, 1, reported) for name, reported in events or ()]
    return Span(
        trace_id="a" * 32,
        span_id="b" * 16,
        name="call",
        start_ns=1,
        end_ns=2,
        attributes=attributes | ({EVENTS: kept} if kept else {}),
    )


OTEL = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "openai",
    "gen_ai.request.model": "m",
    "gen_ai.request.temperature": 0.5,
    "gen_ai.request.max_tokens": 9,
    "gen_ai.response.id": "a1",
    "gen_ai.response.model": "m-2",
    "gen_ai.response.finish_reasons": ["stop"],
    "gen_ai.usage.input_tokens": 7,
    "gen_ai.usage.output_tokens": 3,
    "gen_ai.usage.cache_read.input_tokens": 4,
}
OTEL_TEXTS = {
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}]),
    "gen_ai.input.messages": json.dumps(
        [
            {"role": "user", "parts": [{"type": "text", "content": "Rain?"}]},
            {
                "role": "assistant",
                "parts": [
                    {
                        "type": "tool_call",
                        "id": "c1",
                        "name": "weather",
                        "arguments": {"city": "Ulm"},
                    }
                ],
            },
            {
                "role": "tool",
                "parts": [{"type": "tool_call_response", "id": "c1", "response": "Rain in Ulm."}],
            },
        ]
    ),
    "gen_ai.output.messages": json.dumps(
        [
            {
                "role": "assistant",
                "parts": [
                    {"type": "reasoning", "content": "Wet."},
                    {"type": "text", "content": "Yes."},
                ],
                "finish_reason": "stop",
            }
        ]
    ),
    "gen_ai.tool.definitions": json.dumps([{"type": "function", **TOOL["function"]}]),
}
TOOL_DEFINITIONS = {"gen_ai.tool.definitions": OTEL_TEXTS["gen_ai.tool.definitions"]}
MESSAGE_EVENTS = [
    ("gen_ai.system.message", {"content": "Be brief."}),
    ("gen_ai.user.message", {"gen_ai.event.content": json.dumps({"content": "Rain?"})}),
    ("gen_ai.assistant.message", {"tool_calls": json.dumps([CALL])}),
    ("gen_ai.tool.message", {"id": "c1", "content": "Rain in Ulm."}),
    (
        "gen_ai.choice",
        {
            "index": 0,
            "finish_reason": "stop",
            "message": json.dumps({"content": "Yes.", "reasoning": "Wet."}),
        },
    ),
]
CONTENT_EVENTS = [
    ("gen_ai.content.prompt", {"gen_ai.prompt": json.dumps(REQUEST["messages"])}),
    (
        "gen_ai.content.completion",
        {
            "gen_ai.completion": json.dumps(
                [{"role": "assistant", "content": "Yes.", "reasoning": "Wet."}]
            )
        },
    ),
]
TRACELOOP = {
    "llm.request.type": "chat",
    "gen_ai.system": "OpenAI",
    "gen_ai.request.model": "m",
    "gen_ai.request.temperature": 0.5,
    "gen_ai.request.max_tokens": 9,
    "gen_ai.response.id": "a1",
    "gen_ai.response.model": "m-2",
    "gen_ai.usage.prompt_tokens": 7,
    "gen_ai.usage.completion_tokens": 3,
    "gen_ai.usage.cache_read_input_tokens": 4,
    "gen_ai.prompt.0.role": "system",
    "gen_ai.prompt.0.content": "Be brief.",
    "gen_ai.prompt.1.role": "user",
    "gen_ai.prompt.1.content": '[{"type": "text", "text": "Rain?"}]',
    "gen_ai.prompt.2.role": "assistant",
    "gen_ai.prompt.2.tool_calls.0.id": "c1",
    "gen_ai.prompt.2.tool_calls.0.name": "weather",
    "gen_ai.prompt.2.tool_calls.0.arguments": '{"city":"Ulm"}',
    "gen_ai.prompt.3.role": "tool",
    "gen_ai.prompt.3.tool_call_id": "c1",
    "gen_ai.prompt.3.content": "Rain in Ulm.",
    "gen_ai.completion.0.content": "Yes.",
    "gen_ai.completion.0.reasoning": "Wet.",
    "gen_ai.completion.0.finish_reason": "stop",
    "llm.request.functions.0.name": "weather",
    "llm.request.functions.0.description": "The weather.",
    "llm.request.functions.0.parameters": json.dumps(TOOL["function"]["parameters"]),
}
_CALL_AT = "message.tool_calls.0.tool_call"
OPENINFERENCE = {
    "openinference.span.kind": "LLM",
    "llm.request.model_name": "m",
    "llm.model_name": "m-2",
    "llm.invocation_parameters": '{"temperature": 0.5, "max_tokens": 9, "stream": false}',
    "llm.input_messages.0.message.role": "system",
    "llm.input_messages.0.message.content": "Be brief.",
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.contents.0.message_content.type": "text",
    "llm.input_messages.1.message.contents.0.message_content.text": "Rain?",
    "llm.input_messages.2.message.role": "assistant",
    f"llm.input_messages.2.{_CALL_AT}.id": "c1",
    f"llm.input_messages.2.{_CALL_AT}.function.name": "weather",
    f"llm.input_messages.2.{_CALL_AT}.function.arguments": '{"city":"Ulm"}',
    "llm.input_messages.3.message.role": "tool",
    "llm.input_messages.3.message.tool_call_id": "c1",
    "llm.input_messages.3.message.content": "Rain in Ulm.",
    "llm.output_messages.0.message.contents.0.message_content.type": "reasoning",
    "llm.output_messages.0.message.contents.0.message_content.text": "Wet.",
    "llm.output_messages.0.message.contents.1.message_content.type": "text",
    "llm.output_messages.0.message.contents.1.message_content.text": "Yes.",
    "llm.tools.0.tool.json_schema": json.dumps(TOOL),
    "llm.token_count.prompt": 7,
    "llm.token_count.completion": 3,
    "llm.token_count.prompt_details.cache_read": 4,
    "llm.finish_reason": "stop",
    "output.value": json.dumps({"id": "a1", "model": "m-2"}),
}
WHOLE = {
    "openinference.span.kind": "llm",
    "llm.request.model_name": "m",
    "llm.model_name": "m-2",
    "llm.invocation_parameters": json.dumps({"temperature": 0.5, "max_tokens": 9, "tools": [TOOL]}),
    "llm.token_count.prompt": 7,
    "llm.token_count.completion": 3,
    "llm.token_count.prompt_details.cache_read": 4,
    "input.value": json.dumps({"messages": REQUEST["messages"]}),
    "output.value": json.dumps(RESPONSE),
}
