"""Responses API: streamed answers, event by event with OpenAI's types and through its client."""

from __future__ import annotations

import json

import openai
import pytest

from support.engines.engine_answers import Said, chunk, streamed, tool_call
from support.engines.engine_answers import whole as engine_answer
from support.proxy.answer_adapters import RESPONSES_ANSWERS, OpenAIResponsesClient
from support.proxy.openai_responses import (
    DIALECT,
    PATCH,
    TOOL,
    Json,
    ask,
    events_of,
    stream,
)
from tracegrad.chat.call import Call
from tracegrad.proxy.http.errors import ApiError

CALLS = [("look", '{"at":  "it"}', "c1"), ("apply_patch", '{"input": "a\\nb"}', "c2")]
_, ENDING = streamed(Said())
EVERYTHING = Said("Let me see.", "Hm, what?", CALLS)


def types(events: list[Json]) -> list[str]:
    """Types of events in order, repeated ones once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for at, name in enumerate(names) if at == 0 or name != names[at - 1]]


def last(call: Call, say: Said) -> Json:
    event: Json = events_of(stream(call, say))[-1]
    return event


def test_events_come_in_openais_order() -> None:
    events = events_of(stream(ask(tools=[TOOL, PATCH]), EVERYTHING))
    assert types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]


def test_deltas_add_up_to_what_is_done() -> None:
    reported: dict[str, str] = {}
    for event in events_of(stream(ask(tools=[TOOL, PATCH]), EVERYTHING, size=2)):
        kind, _, change = event["type"].removeprefix("response.").rpartition(".")
        if change == "delta":
            reported[kind] = reported.get(kind, "") + event["delta"]
        elif change == "done" and kind in reported:
            field = {
                "function_call_arguments": "arguments",
                "custom_tool_call_input": "input",
            }.get(kind, "text")
            assert reported[kind] == event[field]
    assert reported == {
        "reasoning_text": "Hm, what?",
        "output_text": "Let me see.",
        "function_call_arguments": '{"at":  "it"}',
        "custom_tool_call_input": "a\nb",
    }


@pytest.mark.parametrize("finish_reason", ["stop", "length", "content_filter", "abort"])
def test_a_stream_ends_with_what_a_whole_answer_is(finish_reason: str) -> None:
    call = ask(tools=[TOOL, PATCH], include=["reasoning.encrypted_content"])
    say = Said("Let me see.", "Hm, what?", CALLS, finish_reason)
    streamed = last(call, say)["response"]
    whole = json.loads(DIALECT.answer(call, engine_answer(say)))
    for response in (streamed, whole):
        for name in ("created_at", "completed_at"):
            response.pop(name, None)
    assert streamed == whole


def test_each_finished_item_is_the_one_of_the_response() -> None:
    events = events_of(stream(ask(tools=[TOOL, PATCH]), EVERYTHING))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


def test_items_begin_empty_and_in_progress() -> None:
    events = events_of(stream(ask(tools=[TOOL, PATCH]), EVERYTHING))
    items = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    thought, message, function, custom = items
    assert (thought["content"], thought["status"]) == ([], "in_progress")
    assert (message["content"], message["status"]) == ([], "in_progress")
    assert (function["arguments"], function["call_id"]) == ("", "c1")
    assert (custom["input"], custom["call_id"]) == ("", "c2")


def test_a_stream_is_sent_as_it_comes() -> None:
    writer = DIALECT.writer(ask())
    assert types(events_of(writer.begin(5))) == ["created", "in_progress"]
    first = writer.chunk(chunk({"content": "He"}))
    assert b'"delta":"He"' in first
    assert writer.chunk(chunk({"role": "assistant", "content": ""})) == b""
    assert b'"delta":"llo"' in writer.chunk(chunk({"content": "llo"}))


def test_a_last_chunk_may_still_say_something() -> None:
    writer = DIALECT.writer(ask())
    body = writer.begin(None)
    end = chunk({"content": "Hello"}, finish="stop")
    events = events_of(body + writer.end([end]))
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello"
    assert events[-1]["response"]["usage"] is None


def test_usage_is_that_of_the_last_chunk() -> None:
    assert last(ask(), Said("a"))["response"]["usage"]["total_tokens"] == 18


@pytest.mark.parametrize(
    ("finish_reason", "event", "status"),
    [
        ("stop", "response.completed", "completed"),
        ("length", "response.incomplete", "incomplete"),
        ("content_filter", "response.incomplete", "incomplete"),
        ("abort", "response.failed", "completed"),
    ],
)
def test_a_finish_reason_decides_how_it_ends(finish_reason: str, event: str, status: str) -> None:
    reported = last(ask(), Said("Half an ans", finish=finish_reason))
    assert reported["type"] == event
    assert reported["response"]["output"][0]["status"] == status


def test_a_stream_that_says_nothing_has_an_empty_message() -> None:
    events = events_of(stream(ask(), Said()))
    assert types(events)[2:] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


def test_text_after_a_call_is_another_message_of_the_turn() -> None:
    call = ask(tools=[TOOL])
    writer = DIALECT.writer(call)
    body = writer.begin(None)
    for each in [
        chunk({"content": "a"}),
        chunk({"tool_calls": [{"index": 0, **tool_call("c1", "look", "{}")}]}),
        chunk({"content": "b"}),
    ]:
        body += writer.chunk(each)
    output = events_of(body + writer.end(ENDING))[-1]["response"]["output"]
    assert [item["id"] for item in output] == [
        f"msg_{call.turn_id}",
        f"fc_{call.turn_id}",
        f"msg_{call.turn_id}_1",
    ]
    [message] = ask(input=output).messages
    assert message["content"] == "ab"
    assert message["tool_calls"][0]["id"] == "c1"


def test_arguments_for_a_call_that_has_ended_break_the_stream() -> None:
    writer = DIALECT.writer(ask(tools=[TOOL]))
    for index, call_id in enumerate(["c1", "c2"]):
        writer.chunk(chunk({"tool_calls": [{"index": index, **tool_call(call_id, "look", "{}")}]}))
    late = chunk({"tool_calls": [{"index": 0, "function": {"arguments": "!"}}]})
    with pytest.raises(ApiError, match="had ended"):
        writer.chunk(late)


def test_a_broken_stream_sends_an_error_and_fails() -> None:
    writer = DIALECT.writer(ask())
    body = writer.begin(None) + writer.chunk(chunk({"content": "Half"}))
    body += writer.error(ApiError(502, "the engine died", kind="upstream_error"))
    events = events_of(body)
    reported, failed = events[-2:]
    assert (reported["type"], reported["code"], reported["message"]) == (
        "error",
        "server_error",
        "the engine died",
    )
    assert reported["error"]["message"] == "the engine died"
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the engine died"}
    assert failed["response"]["status"] == "failed"
    openai_client = OpenAIResponsesClient().client(body)
    with pytest.raises(openai.APIError, match="the engine died") as caught:
        list(openai_client.responses.create(model="m", input="hi", stream=True))
    assert caught.value.code == "server_error"


@pytest.mark.parametrize(
    ("status", "code", "reported"),
    [
        (400, "context_length_exceeded", "context_length_exceeded"),
        (400, None, "invalid_prompt"),
        (429, None, "rate_limit_exceeded"),
        (503, "weights", "server_error"),
    ],
)
def test_codes_that_clients_act_on_are_kept(status: int, code: str | None, reported: str) -> None:
    writer = DIALECT.writer(ask())
    # Nothing has been sent before it: the client still gets a whole stream.
    body = writer.error(ApiError(status, "no", kind="x", code=code)).decode()
    assert body.startswith("event: response.created")
    assert body.count(f'"code":"{reported}"') == 3


def test_a_stream_can_be_kept_alive_before_and_after_it_begins() -> None:
    call = ask()
    writer = DIALECT.writer(call)
    body = writer.keepalive() + writer.keepalive() + writer.begin(5) + writer.keepalive()
    body += writer.chunk(chunk({"content": "a"})) + writer.keepalive()
    events = events_of(body + writer.end(ENDING))
    names = [event["type"] for event in events]
    assert names[:4] == ["response.created", *["response.in_progress"] * 3]
    assert names.count("response.created") == 1
    assert {e["response"]["id"] for e in events if "response" in e} == {f"resp_{call.turn_id}"}


def test_each_keepalive_is_an_event() -> None:
    writer = DIALECT.writer(ask())
    writer.begin(None)
    for _ in range(3):
        assert writer.keepalive().startswith(b"event: response.in_progress\ndata: {")


def entry(token: str) -> Json:
    return {"token": token, "logprob": -1.0, "bytes": list(token.encode()), "top_logprobs": []}


def test_logprobs_come_with_the_text_they_belong_to() -> None:
    writer = DIALECT.writer(ask(include=["message.output_text.logprobs"]))
    body = writer.begin(None)
    for delta, tokens in [
        ({"reasoning": "Hi"}, ["<think>", "Hi"]),
        ({}, ["</think>"]),
        ({"content": "h"}, ["h"]),
        ({}, ["el", "lo"]),  # held back by the engine, which looks for stop strings
        ({"content": "el"}, [" y"]),
        ({"content": "lo y"}, ["ou"]),
        ({"content": "ou"}, ["<|im_end|>"]),
    ]:
        body += writer.chunk(chunk(delta, logprobs=[entry(token) for token in tokens]))
    events = events_of(body + writer.end(ENDING))
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    reported = [[one["token"] for one in event["logprobs"]] for event in deltas]
    assert reported == [["h"], ["el"], ["lo", " y"], ["ou"]]
    part = events[-1]["response"]["output"][1]["content"][0]
    assert [one["token"] for one in part["logprobs"]] == ["h", "el", "lo", " y", "ou"]
    assert part["logprobs"][0]["bytes"] == [104]


def test_a_token_in_two_texts_is_sent_with_the_first() -> None:
    writer = DIALECT.writer(ask(include=["message.output_text.logprobs"]))
    body = writer.begin(None)
    body += writer.chunk(chunk({"content": "ab"}, logprobs=[entry("a"), entry("bc")]))
    body += writer.chunk(chunk({"content": "cd"}, logprobs=[entry("d")]))
    events = events_of(body + writer.end(ENDING))
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    reported = [[one["token"] for one in event["logprobs"]] for event in deltas]
    assert reported == [["a", "bc"], ["d"]]


def test_nobody_else_sees_logprobs() -> None:
    events = events_of(stream(ask(), Said("abc")))
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [event["logprobs"] for event in deltas] == [[]]


def test_openais_client_accumulates_over_keepalives() -> None:
    client = OpenAIResponsesClient().client(RESPONSES_ANSWERS.stream(EVERYTHING))
    with client.responses.stream(model="m", input="hi") as events:
        snapshots = [e.snapshot for e in events if e.type == "response.output_text.delta"]
    assert snapshots[-1] == "Let me see."
