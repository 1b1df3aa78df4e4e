"""What LLM spans of the three conventions say, as chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracegrad.proxy.dialects.registry import call_of
from tracegrad.proxy.genai import is_genai, llm_call
from tracegrad.proxy.genai.events import EVENTS, as_attribute
from tracegrad.proxy.genai.nested import in_order, nested
from tracegrad.records import SpanEnded, Turn, logprobs, token_ids

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
) -> SpanEnded:
    kept = [as_attribute(name, 1, told) for name, told in events or ()]
    return SpanEnded(
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


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(span(OTEL | OTEL_TEXTS), id="OpenTelemetry"),
        pytest.param(
            span(OTEL, [("gen_ai.client.inference.operation.details", OTEL_TEXTS)]),
            id="OpenTelemetry, an event with all",
        ),
        pytest.param(
            span(OTEL | TOOL_DEFINITIONS, MESSAGE_EVENTS), id="OpenTelemetry, an event a message"
        ),
        pytest.param(
            span(OTEL | TOOL_DEFINITIONS, CONTENT_EVENTS), id="OpenTelemetry, the first events"
        ),
        pytest.param(span(TRACELOOP), id="Traceloop"),
        pytest.param(span(OPENINFERENCE), id="OpenInference"),
        pytest.param(span(WHOLE), id="OpenInference, request and response whole"),
    ],
)
def test_every_library_tells_of_the_same_call(told: SpanEnded) -> None:
    call = llm_call(told)
    assert call is not None
    assert call.request == REQUEST
    assert call.response == RESPONSE
    assert (call.model, call.finish_reason, call.response_id) == ("m-2", "stop", "a1")
    assert call.sampling == {"temperature": 0.5, "max_tokens": 9}
    assert call.reply == RESPONSE["choices"][0]["message"]
    assert is_genai(told)


@pytest.mark.parametrize(
    "attributes",
    [
        {"http.request.method": "POST"},
        {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather"},
        {"gen_ai.operation.name": "invoke_agent", **OTEL_TEXTS},
        {"gen_ai.operation.name": "embeddings", "gen_ai.request.model": "m"},
        {"llm.request.type": "embedding", "gen_ai.request.model": "m"},
        {"openinference.span.kind": "CHAIN", "llm.model_name": "m"},
        {"openinference.span.kind": "AGENT", "gen_ai.operation.name": "chat"},
        {"traceloop.span.kind": "workflow"},
        {"gen_ai.operation.name": ["chat"]},
    ],
)
def test_other_spans_are_no_calls(attributes: dict[str, Any]) -> None:
    assert llm_call(span(attributes)) is None


def test_a_library_that_keeps_the_texts_to_itself_tells_the_rest() -> None:
    call = llm_call(span(OTEL))
    assert call is not None
    assert call.request == {"model": "m", "messages": [], "temperature": 0.5, "max_tokens": 9}
    assert call.response is not None
    assert call.response["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": None},
        "finish_reason": "stop",
    }
    assert call.response["usage"] == RESPONSE["usage"]


def test_settings_that_no_request_can_have_are_left_out() -> None:
    odd = {"gen_ai.request.top_p": "high", "gen_ai.request.choice.count": 0}
    call = llm_call(span(OTEL | odd | {"gen_ai.request.seed": 3}))
    assert call is not None
    assert call.sampling == {"temperature": 0.5, "max_tokens": 9, "seed": 3}


def test_a_call_that_failed_has_no_response() -> None:
    call = llm_call(span({"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}))
    assert call is not None
    assert (call.response, call.finish_reason, call.model) == (None, None, "m")


def test_results_beside_a_text_become_messages_of_their_own() -> None:
    parts = [
        {"type": "tool_call_response", "id": "c1", "result": {"rain": True}},
        {"type": "tool_call_response", "id": "c2", "response": "dry"},
        {"type": "text", "content": "And now?"},
        {"type": "uri", "modality": "image", "uri": "https://example.com/a.png"},
        {"type": "blob", "modality": "audio", "mime_type": "audio/wav", "content": "UklG"},
    ]
    told = [{"role": "user", "parts": parts}]
    call = llm_call(span(OTEL | {"gen_ai.input.messages": json.dumps(told)}))
    assert call is not None
    assert call.request["messages"] == [
        {"role": "tool", "tool_call_id": "c1", "content": '{"rain":true}'},
        {"role": "tool", "tool_call_id": "c2", "content": "dry"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And now?"},
                {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
                {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,UklG"}},
            ],
        },
    ]


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("end_turn", "stop"),
        ("tool_call", "tool_calls"),
        ("tool_use", "tool_calls"),
        ("MAX_TOKENS", "length"),
        ("stop", "stop"),
        ("pause_turn", "pause_turn"),
    ],
)
def test_finish_reasons_are_those_of_chat_completions(told: str, reason: str) -> None:
    call = llm_call(span(OTEL | {"gen_ai.response.finish_reasons": [told]}))
    assert call is not None
    assert call.finish_reason == reason


def test_langchain_has_the_answers_name_further_in() -> None:
    message = {"kwargs": {"response_metadata": {"id": "a1"}}}
    output = {"generations": [[{"message": message, "generation_info": {"finish_reason": "stop"}}]]}
    attributes = {"openinference.span.kind": "LLM", "output.value": json.dumps(output)}
    call = llm_call(span(attributes))
    assert call is not None
    assert (call.response_id, call.finish_reason) == ("a1", "stop")


def test_texts_that_are_no_json_are_what_was_said() -> None:
    attributes = {"openinference.span.kind": "LLM", "input.value": "Rain?", "output.value": "Yes."}
    call = llm_call(span(attributes))
    assert call is not None
    assert call.request["messages"] == [{"role": "user", "content": "Rain?"}]
    assert call.reply == {"role": "assistant", "content": "Yes."}


def test_numbers_in_names_are_an_order_and_nothing_else() -> None:
    tree = nested({"a.10.x": 1, "a.9.x": 2, "a.999999999.x": 3, "a.b": 4, "a.9": 5}, "a")
    assert in_order(tree) == [{"x": 2}, {"x": 1}, {"x": 3}]
    assert in_order({"9" * 5000: {"x": 1}}) == []


NAMES = sorted({"llm.request.type", *OTEL, *OTEL_TEXTS, *TRACELOOP, *OPENINFERENCE, *WHOLE, EVENTS})
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)  # which OTLP's reader makes texts of
    | st.text()
    | st.sampled_from(
        [json.dumps(REQUEST), json.dumps(RESPONSE), "[{}]", "[[1]]", "[NaN]", "LLM", "chat"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["parts", "type", "role", "content", "name", "attributes", "text"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    attributes=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=12),
    kind=st.sampled_from(
        [{"openinference.span.kind": "LLM"}, {"gen_ai.operation.name": "chat"}, {}]
    ),
    encoded=st.booleans(),
)
def test_whatever_a_span_holds_is_read_as_messages_that_can_be_read_again(
    attributes: dict[str, Any], kind: dict[str, str], encoded: bool
) -> None:
    if encoded:
        # As most libraries do, since attributes hold no objects.
        attributes = {
            name: value if isinstance(value, str | int | float) else json.dumps(value)
            for name, value in attributes.items()
        }
    call = llm_call(span(attributes | kind))
    if call is None or not call.request["messages"]:
        return
    turn = Turn(
        rollout_id="r",
        dialect="otel",
        model=call.model,
        prompt_token_ids=token_ids(),
        completion_token_ids=token_ids(),
        completion_logprobs=logprobs(),
        policy_versions=(),
        request=call.request,
        response=call.response,
    )
    again = call_of(turn)
    assert again is not None, call.request
    assert again.messages == call.request["messages"]
