"""What LLM spans of the three conventions say, as chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.proxy.genai_spans import (
    CONTENT_EVENTS,
    MESSAGE_EVENTS,
    OPENINFERENCE,
    OTEL,
    OTEL_TEXTS,
    REQUEST,
    RESPONSE,
    TOOL_DEFINITIONS,
    TRACELOOP,
    WHOLE,
    span,
)
from tracegrad.events import Span
from tracegrad.proxy.otel.semconv import is_genai, llm_call
from tracegrad.proxy.otel.semconv.flat_attributes import in_index_order, unflatten


@pytest.mark.parametrize(
    "reported",
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
def test_every_library_reports_the_same_call(reported: Span) -> None:
    call = llm_call(reported)
    assert call is not None
    assert call.request == REQUEST
    assert call.response == RESPONSE
    assert (call.model, call.finish_reason, call.response_id) == ("m-2", "stop", "a1")
    assert call.sampling == {"temperature": 0.5, "max_tokens": 9}
    assert call.reply == RESPONSE["choices"][0]["message"]
    assert is_genai(reported)


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


def test_a_library_that_keeps_the_texts_to_itself_reports_the_rest() -> None:
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
    reported = [{"role": "user", "parts": parts}]
    call = llm_call(span(OTEL | {"gen_ai.input.messages": json.dumps(reported)}))
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
    ("reported", "reason"),
    [
        ("end_turn", "stop"),
        ("tool_call", "tool_calls"),
        ("tool_use", "tool_calls"),
        ("MAX_TOKENS", "length"),
        ("stop", "stop"),
        ("pause_turn", "pause_turn"),
    ],
)
def test_finish_reasons_are_those_of_chat_completions(reported: str, reason: str) -> None:
    call = llm_call(span(OTEL | {"gen_ai.response.finish_reasons": [reported]}))
    assert call is not None
    assert call.finish_reason == reason


def test_langchain_has_the_answers_name_further_in() -> None:
    message = {"kwargs": {"response_metadata": {"id": "a1"}}}
    output = {"generations": [[{"message": message, "generation_info": {"finish_reason": "stop"}}]]}
    attributes = {"openinference.span.kind": "LLM", "output.value": json.dumps(output)}
    call = llm_call(span(attributes))
    assert call is not None
    assert (call.response_id, call.finish_reason) == ("a1", "stop")


def test_texts_that_are_no_json_are_messages() -> None:
    attributes = {"openinference.span.kind": "LLM", "input.value": "Rain?", "output.value": "Yes."}
    call = llm_call(span(attributes))
    assert call is not None
    assert call.request["messages"] == [{"role": "user", "content": "Rain?"}]
    assert call.reply == {"role": "assistant", "content": "Yes."}


def test_numbers_in_names_are_an_order_and_nothing_else() -> None:
    tree = unflatten({"a.10.x": 1, "a.9.x": 2, "a.999999999.x": 3, "a.b": 4, "a.9": 5}, "a")
    assert in_index_order(tree) == [{"x": 2}, {"x": 1}, {"x": 3}]
    assert in_index_order({"9" * 5000: {"x": 1}}) == []


def test_a_span_of_openinference_that_says_nothing_of_a_call_is_none() -> None:
    """As those that its instrumentor for LlamaIndex puts around a call."""
    attributes = {
        "openinference.span.kind": "LLM",
        "llm.model_name": "m",
        "llm.invocation_parameters": "{}",
        "llm.tools.0.tool.json_schema": "{}",
        "output.value": '{"messages": ["ChatMessage(...)"]}',
    }
    assert llm_call(span(attributes)) is None
    assert llm_call(span({**attributes, "llm.prompts.0.prompt.text": "Rain?"})) is not None
