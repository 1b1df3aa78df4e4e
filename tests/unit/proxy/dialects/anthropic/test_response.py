"""Answers and errors as Anthropic's own client reads them, streamed and not."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2
import orjson
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from support.engines.engine_answers import (
    Said,
    chunk,
    same_message,
    streamed,
    whole,
)
from support.proxy.answer_adapters import AnthropicClient, serve
from tracegrad.chat.call import Call
from tracegrad.proxy.dialects.anthropic.request import AnthropicDialect
from tracegrad.proxy.http.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, BadRequest, Unavailable

Json = dict[str, Any]

ASKED = AnthropicClient.asked
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
TWO_CALLS = Said("I look.", "Hm.", [("look", '{"at": 1}'), ("see", '{\n "b": {}}')])


def call_of(**fields: Any) -> Call:
    return AnthropicDialect().parse(orjson.dumps({**ASKED, **fields}), {}, {})


def answered(one: Said, **fields: Any) -> Json:
    body: Json = orjson.loads(AnthropicDialect().answer(call_of(**fields), whole(one)))
    Message.model_validate(body)
    return body


def stream_of(one: Said, *, size: int = 4, call: Call | None = None) -> bytes:
    writer = AnthropicDialect().writer(call or call_of(stream=True))
    going_on, ending = streamed(one, size=size)
    begun = writer.keepalive() + writer.begin(one.prompt_tokens)
    pieces = [writer.chunk(chunk) + writer.keepalive() for chunk in going_on]
    return begun + b"".join(pieces) + writer.end(ending)


def events_of(stream: bytes) -> list[Json]:
    """The events but for pings, each checked against the vendor's types."""
    events = []
    for event in stream.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        body = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + body["type"].encode()
        if body["type"] not in ("ping", "error"):
            EVENT.validate_python(body)
        if body["type"] != "ping":
            events.append(body)
    return events


def claude(data: bytes, status: int = 200) -> anthropic.Anthropic:
    return AnthropicClient().client(serve(data, status))


def test_a_whole_answer_has_blocks_in_the_vendors_order() -> None:
    call = call_of()
    body = orjson.loads(AnthropicDialect().answer(call, whole(TWO_CALLS)))
    Message.model_validate(body)
    assert body == {
        "id": f"msg_{call.turn_id}",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": call.turn_id},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "chatcmpl-tool-0", "name": "look", "input": {"at": 1}},
            {"type": "tool_use", "id": "chatcmpl-tool-1", "name": "see", "input": {"b": {}}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 11,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 7,
        },
    }


def test_an_empty_answer_has_no_blocks() -> None:
    assert answered(Said())["content"] == []
    hidden = answered(Said(reasoning="Hm."), thinking={"type": "disabled"})
    assert hidden["content"] == []


def test_tokens_from_the_engines_cache_are_counted_separately() -> None:
    answer = whole(Said("ok"))
    answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 4}
    usage = orjson.loads(AnthropicDialect().answer(call_of(), answer))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (7, 4)
    del answer["usage"]
    assert orjson.loads(AnthropicDialect().answer(call_of(), answer))["usage"]["input_tokens"] == 0


@pytest.mark.parametrize(
    ("one", "reason", "sequence"),
    [
        (Said("a"), "end_turn", None),
        (Said("a", hit=151643), "end_turn", None),
        (Said("a", hit="END"), "stop_sequence", "END"),
        (Said("a", finish="length"), "max_tokens", None),
        (Said("a", finish="abort"), "max_tokens", None),
        (Said("a", finish="content_filter"), "refusal", None),
        (Said(calls=[("look", "{}")]), "tool_use", None),
        (Said(calls=[("look", "{}")], finish="stop"), "tool_use", None),
        (Said(calls=[("look", "{}")], finish="stop", hit="END"), "tool_use", None),
        (Said(calls=[("look", '{"a')], finish="stop", hit="END"), "stop_sequence", "END"),
        (Said(calls=[("look", '{"a')], finish="length"), "max_tokens", None),
    ],
)
def test_stop_reasons(one: Said, reason: str, sequence: str | None) -> None:
    body = answered(one)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    delta = events_of(stream_of(one))[-2]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


def test_a_stream_has_the_vendors_events_in_order() -> None:
    call = call_of(stream=True)
    events = events_of(stream_of(TWO_CALLS, size=100, call=call))
    shape = [
        (event["type"], event.get("index"), event.get("delta", event.get("content_block")))
        for event in events
    ]
    tool = {"type": "tool_use", "input": {}}
    assert shape[1:-1] == [
        ("content_block_start", 0, {"type": "thinking", "thinking": "", "signature": ""}),
        ("content_block_delta", 0, {"type": "thinking_delta", "thinking": "Hm."}),
        ("content_block_delta", 0, {"type": "signature_delta", "signature": call.turn_id}),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, {"type": "text", "text": ""}),
        ("content_block_delta", 1, {"type": "text_delta", "text": "I look."}),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, {**tool, "id": "chatcmpl-tool-0", "name": "look"}),
        ("content_block_delta", 2, {"type": "input_json_delta", "partial_json": '{"at": 1}'}),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, {**tool, "id": "chatcmpl-tool-1", "name": "see"}),
        ("content_block_delta", 3, {"type": "input_json_delta", "partial_json": '{\n "b": {}}'}),
        ("content_block_stop", 3, None),
        ("message_delta", None, {"stop_reason": "tool_use", "stop_sequence": None}),
    ]
    assert events[0]["message"]["id"] == f"msg_{call.turn_id}"
    assert events[0]["message"]["usage"]["input_tokens"] == 11
    assert events[-2]["usage"]["output_tokens"] == 7
    assert events[-1] == {"type": "message_stop"}


def test_text_between_pieces_of_a_tool_call_waits_for_its_end() -> None:
    writer = AnthropicDialect().writer(call_of())
    head = {"index": 0, "id": "c", "function": {"name": "look", "arguments": '{"a"'}}
    writer.begin(None)
    out = writer.chunk(chunk({"tool_calls": [head]}))
    held = writer.chunk(chunk({"content": "late"}))
    more = writer.chunk(chunk({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}))
    end = writer.end([chunk({}, finish="tool_calls")])
    assert held == b""
    blocks = [e for e in events_of(out + more + end) if e["type"].startswith("content_block")]
    reported = [
        e["delta"].get("partial_json", e["delta"].get("text")) for e in blocks if "delta" in e
    ]
    assert reported == ['{"a"', ":1}", "late"]
    assert [e["index"] for e in blocks] == [0, 0, 0, 0, 1, 1, 1]


def test_hidden_thoughts_are_in_no_event() -> None:
    call = call_of(thinking={"type": "disabled"})
    events = events_of(stream_of(Said("ok", "Hm."), call=call))
    assert [e["content_block"]["type"] for e in events if "content_block" in e] == ["text"]


def test_a_call_that_was_cut_short_goes_out_as_it_is() -> None:
    one = Said(calls=[("look", '{"path": "/etc/ho')], finish="length")
    deltas = [e["delta"] for e in events_of(stream_of(one)) if e["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == '{"path": "/etc/ho'


@pytest.mark.parametrize(
    ("error", "kind", "raised"),
    [
        (BadRequest("n is wrong", param="n"), "invalid_request_error", anthropic.BadRequestError),
        (ApiError(401, "who?", kind="x"), "authentication_error", anthropic.AuthenticationError),
        (ApiError(403, "no", kind="x"), "permission_error", anthropic.PermissionDeniedError),
        (ApiError(404, "what?", kind="x"), "not_found_error", anthropic.NotFoundError),
        (ApiError(413, "big", kind="x"), "request_too_large", anthropic.RequestTooLargeError),
        (ApiError(429, "slow", kind="x"), "rate_limit_error", anthropic.RateLimitError),
        (ApiError(502, "broken", kind="x"), "api_error", anthropic.InternalServerError),
        (Unavailable("later", code="x"), "overloaded_error", anthropic.InternalServerError),
        (ApiError(504, "late", kind="x"), "timeout_error", anthropic.InternalServerError),
    ],
)
def test_errors_have_the_vendors_types(error: ApiError, kind: str, raised: type) -> None:
    body = AnthropicDialect().error(error)
    assert orjson.loads(body) == {
        "type": "error",
        "error": {"type": kind, "message": error.message},
    }
    with pytest.raises(anthropic.APIStatusError) as caught:
        claude(body, error.status).messages.create(**ASKED)
    assert isinstance(caught.value, raised)
    assert error.message in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            "This model's maximum context length is 4096 tokens. However, your prompt contains "
            "5000 input tokens, which exceeds this limit even without any output tokens.",
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        (
            "This model's maximum context length is 4096 tokens. However, your prompt contains "
            "at least 4097 input tokens, which exceeds this limit.",
            "prompt is too long: 4097 tokens > 4096 maximum",
        ),
        (
            "Input length (70) exceeds model's maximum context length (64).",
            "prompt is too long: 70 tokens > 64 maximum",
        ),
        ("context window full", "prompt is too long: context window full"),
    ],
)
def test_the_error_of_an_overlong_prompt_is_worded_for_claude_code(
    engine: str, message: str
) -> None:
    error = ApiError(400, engine, kind="invalid_request_error", code=CONTEXT_LENGTH_EXCEEDED)
    assert orjson.loads(AnthropicDialect().error(error))["error"]["message"] == message


def test_the_error_of_a_template_without_system_text_inside_is_worded_for_claude_code() -> None:
    error = ApiError(400, "System message must be at the beginning.", kind="BadRequestError")
    reported = orjson.loads(AnthropicDialect().error(error))["error"]
    assert reported["details"] == {"error_code": "mid_conversation_system_not_supported"}
    assert "role 'system' inside messages is not supported" in reported["message"]


def test_an_error_amid_a_stream_is_an_event() -> None:
    writer = AnthropicDialect().writer(call_of())
    stream = writer.begin(1) + writer.chunk(chunk({"content": "a"}))
    stream += writer.error(ApiError(503, "the engine is gone", kind="x"))
    assert events_of(stream)[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the engine is gone"},
    }


async def test_the_clients_own_echo_is_taken_as_a_request() -> None:
    """The SDK sends blocks back as it has them, with every field that it knows."""
    sent: list[Json] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        sent.append(orjson.loads(request.content))
        return httpx2.Response(200, json=answered(TWO_CALLS))

    http = httpx2.AsyncClient(transport=httpx2.MockTransport(handle))
    async with anthropic.AsyncAnthropic(api_key="k", http_client=http) as claude:
        message = await claude.messages.create(**ASKED)
        again = [*ASKED["messages"], message.to_param(), *ASKED["messages"]]
        await claude.messages.create(**{**ASKED, "messages": again})
    assert same_message(call_of(**sent[1]).messages[1], TWO_CALLS.message)
