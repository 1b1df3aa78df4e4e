"""Answers and errors as Google's own clients read them, streamed and not."""

from __future__ import annotations

import re

import orjson
import pytest
from google.genai import errors, types

from support.engines.engine_answers import (
    Said,
    chunk,
    streamed,
    whole,
)
from support.proxy.answer_adapters import GeminiClient
from support.proxy.gemini_requests import STREAMED, Json, parse
from tracegrad.chat.call import Call
from tracegrad.proxy.dialects.gemini.request import GeminiDialect
from tracegrad.proxy.http.errors import ApiError, BadRequest, Unavailable

THOUGHTS = {"thinkingConfig": {"includeThoughts": True}}
TWO_CALLS = Said("I look.", "Hm.", [("look", '{"at": 1}'), ("see", '{\n "b": {}}')])
# How Gemini CLI's client takes events out of what it has got so far; its `.` is JavaScript's.
CLI_EVENT = re.compile("^\\s*data: ([^\n\r\u2028\u2029]*)(?:\n\n|\r\r|\r\n\r\n)")


def call_of(alt: str = "sse", config: Json = THOUGHTS) -> Call:
    return parse(STREAMED, {"alt": alt}, generationConfig=config)


def answered(*each: Said, call: Call | None = None) -> Json:
    body: Json = orjson.loads(GeminiDialect().answer(call or call_of(), whole(*each)))
    types.GenerateContentResponse.model_validate(body)
    return body


def pieces_of(one: Said, *, size: int = 4, call: Call | None = None) -> list[bytes]:
    writer = GeminiDialect().writer(call or call_of())
    going_on, ending = streamed(one, size=size)
    pieces = [writer.keepalive(), writer.begin(one.prompt_tokens)]
    for each in going_on:
        pieces += [writer.chunk(each), writer.keepalive()]
    return [*pieces, writer.end(ending)]


def events_of(pieces: list[bytes]) -> list[Json]:
    """As Gemini CLI reads them, each checked against the vendor's types."""
    events, rest = [], ""
    for piece in pieces:
        rest += piece.decode()
        while found := CLI_EVENT.match(rest):
            events.append(orjson.loads(found[1]))
            rest = rest[found.end() :]
    assert rest.strip() == ""
    for event in events:
        types.GenerateContentResponse.model_validate(event)
    return events


def parts_of(events: list[Json]) -> list[Json]:
    return [part for event in events for part in event["candidates"][0]["content"]["parts"]]


def test_a_whole_answer_has_parts_in_order() -> None:
    call = call_of()
    assert answered(TWO_CALLS, call=call) == {
        "candidates": [
            {
                "index": 0,
                "content": {
                    "role": "model",
                    "parts": [
                        {"text": "Hm.", "thought": True},
                        {"text": "I look."},
                        {
                            "functionCall": {
                                "id": "chatcmpl-tool-0",
                                "name": "look",
                                "args": {"at": 1},
                            }
                        },
                        {
                            "functionCall": {
                                "id": "chatcmpl-tool-1",
                                "name": "see",
                                "args": {"b": {}},
                            }
                        },
                    ],
                },
                "finishReason": "STOP",
            }
        ],
        "usageMetadata": {
            "promptTokenCount": 11,
            "candidatesTokenCount": 7,
            "totalTokenCount": 18,
        },
        "modelVersion": "m",
        "responseId": call.turn_id,
    }


def test_thoughts_that_were_not_asked_for_are_left_out() -> None:
    call = call_of(config={})
    one = Said("ok", "Hm.")
    assert answered(one, call=call)["candidates"][0]["content"]["parts"] == [{"text": "ok"}]
    assert "".join(p["text"] for p in parts_of(events_of(pieces_of(one, call=call)))) == "ok"


def test_each_choice_is_a_candidate() -> None:
    body = answered(Said("a"), Said("b", finish="length"))
    assert [
        (c["index"], c["content"]["parts"][0]["text"], c["finishReason"])
        for c in body["candidates"]
    ] == [(0, "a", "STOP"), (1, "b", "MAX_TOKENS")]


def test_choices_that_are_streamed_side_by_side_stay_apart() -> None:
    calls = [Said(calls=[("look", '{"a": 1}')]), Said("so", calls=[("look", '{"b": 2}')])]
    plans = [streamed(one, index=index) for index, one in enumerate(calls)]
    writer = GeminiDialect().writer(call_of())
    longest = max(len(going_on) for going_on, _ in plans)
    chunks = [going_on[i] for i in range(longest) for going_on, _ in plans if i < len(going_on)]
    ending = [plans[1][1][0], plans[0][1][0], plans[0][1][1]]
    *_, last = events_of([*map(writer.chunk, chunks), writer.end(ending)])
    args = {
        c["index"]: [p["functionCall"]["args"] for p in c["content"]["parts"]]
        for c in last["candidates"]
    }
    assert args == {0: [{"a": 1}], 1: [{"b": 2}]}


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ("stop", "STOP"),
        ("tool_calls", "STOP"),
        ("length", "MAX_TOKENS"),
        ("content_filter", "SAFETY"),
        ("abort", "OTHER"),
    ],
)
def test_finish_reasons(finish: str, reason: str) -> None:
    one = Said("a", finish=finish)
    assert answered(one)["candidates"][0]["finishReason"] == reason
    assert events_of(pieces_of(one))[-1]["candidates"][0]["finishReason"] == reason


def test_usage_counts_thoughts_and_cached_tokens_separately() -> None:
    answer = whole(Said("ok"))
    answer["usage"]["completion_tokens_details"] = {"reasoning_tokens": 3}
    answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 4}
    usage = orjson.loads(GeminiDialect().answer(call_of(), answer))["usageMetadata"]
    assert usage == {
        "promptTokenCount": 11,
        "candidatesTokenCount": 4,
        "thoughtsTokenCount": 3,
        "totalTokenCount": 18,
        "cachedContentTokenCount": 4,
    }


def test_log_probabilities_are_in_the_vendors_shape() -> None:
    top = {"token": "b", "logprob": -1.5}
    entries = [
        {"token": "a", "logprob": -0.5, "top_logprobs": [top]},
        {"token": "c", "logprob": -1.5, "top_logprobs": []},
    ]
    answer = whole(Said("ac"))
    answer["choices"][0]["logprobs"] = {"content": entries}
    body = orjson.loads(GeminiDialect().answer(call_of(), answer))
    types.GenerateContentResponse.model_validate(body)
    [candidate] = body["candidates"]
    assert candidate["avgLogprobs"] == -1
    assert candidate["logprobsResult"] == {
        "chosenCandidates": [
            {"token": "a", "logProbability": -0.5},
            {"token": "c", "logProbability": -1.5},
        ],
        "topCandidates": [
            {"candidates": [{"token": "b", "logProbability": -1.5}]},
            {"candidates": []},
        ],
    }
    writer = GeminiDialect().writer(call_of())
    piece = chunk({"content": "a"})
    piece["choices"][0]["logprobs"] = {"content": entries[:1]}
    [event] = events_of([writer.chunk(piece)])
    chosen = event["candidates"][0]["logprobsResult"]["chosenCandidates"]
    assert chosen == [{"token": "a", "logProbability": -0.5}]


def test_calls_are_streamed_whole_with_the_end() -> None:
    *earlier, last = events_of(pieces_of(TWO_CALLS))
    assert [list(part) for part in parts_of(earlier)] == [["text", "thought"]] + [["text"]] * 2
    [candidate] = last["candidates"]
    assert candidate["finishReason"] == "STOP"
    assert [part["functionCall"]["args"] for part in candidate["content"]["parts"]] == [
        {"at": 1},
        {"b": {}},
    ]
    assert last["usageMetadata"]["totalTokenCount"] == 18
    assert "usageMetadata" not in earlier[0]


def test_without_sse_the_stream_is_one_array() -> None:
    call = call_of("json")
    array = orjson.loads(b"".join(pieces_of(TWO_CALLS, call=call)))
    events = events_of(pieces_of(TWO_CALLS))
    assert [parts_of([event]) for event in array] == [parts_of([event]) for event in events]
    for each in array:
        types.GenerateContentResponse.model_validate(each)


def test_unicode_line_ends_do_not_end_an_events_line() -> None:
    one = Said("a\u2028b\u2029c\x85d", calls=[("look", '{"at":\n "\u2028"}')])
    *texts_, call = parts_of(events_of(pieces_of(one, size=100)))
    assert texts_ == [{"text": one.content}]
    assert call["functionCall"]["args"] == {"at": "\u2028"}
    assert b"\xe2\x80" not in b"".join(pieces_of(one))


def test_an_empty_answer_has_a_candidate_without_parts() -> None:
    assert answered(Said())["candidates"][0]["content"] == {"role": "model", "parts": []}
    [event] = events_of(pieces_of(Said()))
    assert event["candidates"][0]["finishReason"] == "STOP"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ApiError(400, "no", kind="x"), "INVALID_ARGUMENT"),
        (ApiError(401, "who?", kind="x"), "UNAUTHENTICATED"),
        (ApiError(403, "no", kind="x"), "PERMISSION_DENIED"),
        (ApiError(404, "what?", kind="x"), "NOT_FOUND"),
        (ApiError(413, "big", kind="x"), "INVALID_ARGUMENT"),
        (ApiError(429, "slow", kind="x"), "RESOURCE_EXHAUSTED"),
        (ApiError(500, "oh", kind="x"), "INTERNAL"),
        (ApiError(502, "broken", kind="x"), "UNAVAILABLE"),
        (Unavailable("later", code="x"), "UNAVAILABLE"),
        (ApiError(504, "late", kind="x"), "DEADLINE_EXCEEDED"),
    ],
)
def test_errors_have_the_vendors_names(error: ApiError, status: str) -> None:
    body = GeminiDialect().error(error)
    reported = {"code": error.status, "message": error.message, "status": status}
    assert orjson.loads(body) == {"error": reported}
    with pytest.raises(errors.APIError) as caught:
        GeminiClient().client(body, error.status).models.generate_content(model="m", contents="hi")
    assert (caught.value.code, caught.value.status) == (error.status, status)
    assert caught.value.message == error.message


def test_a_refusal_names_the_field_as_google_does() -> None:
    error = BadRequest("contents: is missing", param="contents")
    [detail] = orjson.loads(GeminiDialect().error(error))["error"]["details"]
    assert detail == {
        "@type": "type.googleapis.com/google.rpc.BadRequest",
        "fieldViolations": [{"field": "contents", "description": "contents: is missing"}],
    }


def test_an_error_in_the_midst_of_a_stream_is_raised() -> None:
    gone = ApiError(503, "the engine is gone", kind="x")
    writer = GeminiDialect().writer(call_of())
    begun = writer.begin(1) + writer.chunk(chunk({"content": "a"}))
    stream = (
        GeminiClient()
        .client(begun + writer.error(gone))
        .models.generate_content_stream(model="m", contents="hi")
    )
    assert next(stream).text == "a"
    with pytest.raises(errors.APIError, match="the engine is gone"):
        next(stream)
    # Gemini CLI looks for a piece that is JSON, and has an error in it.
    assert orjson.loads(writer.error(gone))["error"]["code"] == 503


@pytest.mark.parametrize("said_before", [True, False])
def test_an_error_in_the_midst_of_an_array_is_its_last_element(said_before: bool) -> None:
    writer = GeminiDialect().writer(call_of("json"))
    out = writer.begin(1)
    if said_before:
        out += writer.chunk(chunk({"content": "a"}))
    array = orjson.loads(out + writer.error(ApiError(500, "oh", kind="x")))
    assert len(array) == 1 + said_before
    assert array[-1]["error"]["status"] == "INTERNAL"
