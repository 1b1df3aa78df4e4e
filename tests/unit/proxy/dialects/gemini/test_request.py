"""Gemini's requests as canonical calls."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from google.genai import types

from support.proxy.gemini_requests import HI, STREAMED, USER, WHOLE, Json, parse, refused
from tracegrad.proxy.dialects.gemini.request import GeminiDialect, count_answer, count_request
from tracegrad.proxy.http.errors import BadRequest


def config(**fields: Any) -> Json:
    return parse(generationConfig=fields).body


def history(*contents: Json) -> list[Json]:
    return parse(contents=[*contents, HI]).messages[:-1]


def called(name: str, args: Json | None = None, **fields: Any) -> Json:
    return {"functionCall": {"name": name, "args": args or {}, **fields}}


def responded(name: str, response: Json, **fields: Any) -> Json:
    return {"functionResponse": {"name": name, "response": response, **fields}}


def test_a_plain_request_is_a_chat_completion() -> None:
    call = parse(
        systemInstruction={"role": "user", "parts": [{"text": "Be"}, {"text": "brief."}]},
        generationConfig={
            "temperature": 0.5,
            "topP": 0.9,
            "topK": 64.0,
            "maxOutputTokens": 9,
            "stopSequences": ["x"],
            "candidateCount": 2,
            "seed": 7,
            "presencePenalty": 0.1,
            "frequencyPenalty": 0.2,
            "responseMimeType": "text/plain",
            "responseModalities": ["TEXT"],
        },
        safetySettings=[{"category": "HARM_CATEGORY_HATE_SPEECH", "threshold": "BLOCK_NONE"}],
        labels={"a": "b"},
    )
    assert call.body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be\nbrief."}, USER],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 64,
        "max_tokens": 9,
        "stop": ["x"],
        "n": 2,
        "seed": 7,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
    }
    assert (call.dialect, call.stream, call.n, call.untrainable) == ("gemini", False, 2, None)
    assert isinstance(call.body["top_k"], int)


def test_the_path_and_the_query_say_how_the_answer_comes() -> None:
    assert parse(STREAMED).stream
    assert parse({"model": "models/m", "method": "generateContent"}).body["model"] == "m"
    array = GeminiDialect().writer(parse(STREAMED))
    events = GeminiDialect().writer(parse(STREAMED, {"alt": "sse"}))
    assert array.content_type == "application/json; charset=utf-8"
    assert events.content_type == "text/event-stream; charset=utf-8"
    with pytest.raises(BadRequest) as unknown:
        parse({"model": "m", "method": "embedContent"})
    assert unknown.value.status == 404
    with pytest.raises(BadRequest, match="alt is 'proto'"):
        parse(STREAMED, {"alt": "proto"})


def test_names_may_be_in_snake_case_and_lists_of_one_left_out() -> None:
    raw = {
        "system_instruction": {"parts": {"text": "Be brief."}},
        "contents": {"parts": {"inline_data": {"mime_type": "image/png", "data": "QQ"}}},
        "generation_config": {"max_output_tokens": 3, "stop_sequences": ["x"]},
        "tools": {"function_declarations": {"name": "look"}},
        "tool_config": {"function_calling_config": {"mode": "ANY"}},
    }
    body = GeminiDialect().parse(orjson.dumps(raw), WHOLE, {}).body
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}
    assert body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [image]},
        ],
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "tool_choice": "required",
        "max_tokens": 3,
        "stop": ["x"],
    }
    error = refused(generation_config={"speech_config": {}, "max_output_tokens": "x"})
    assert error.param == "generation_config.speech_config"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"contents": []}, "contents"),
        ({"contents": "hi"}, "contents"),
        ({"contents": [{"role": "system", "parts": [{"text": "x"}]}]}, "contents[0].role"),
        ({"contents": [HI, {"role": "model", "parts": [{"text": "{"}]}]}, "contents[1]"),
        ({"contents": [{"role": "user"}]}, "contents[0]"),
        ({"contents": [{"parts": [{}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{"text": "a", "inlineData": {}}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{"executableCode": {}}]}]}, "contents[0].parts[0].executable"),
        ({"contents": [{"parts": [called("look")]}]}, "contents[0].parts[0].functionCall"),
        ({"contents": [{"parts": [responded("x", {})]}]}, "contents[0].parts[0].functionResponse"),
        ({"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch"),
        ({"tools": [{"code_execution": {}}]}, "tools[0].code_execution"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        ({"generationConfig": {"speechConfig": {}}}, "generationConfig.speechConfig"),
        ({"generationConfig": {"candidateCount": 0}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"topK": 0.5}}, "generationConfig.topK"),
        ({"generationConfig": {"logprobs": 3}}, "generationConfig.logprobs"),
        ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "generationConfig.response"),
        ({"generationConfig": {"responseSchema": {}}}, "generationConfig.responseSchema"),
        ({"generationConfig": {"responseMimeType": "audio/wav"}}, "generationConfig.response"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.function"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "VALIDATED"}}}, "toolConfig.function"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: Json, named: str) -> None:
    error = refused(**fields)
    assert error.status == 400
    assert error.param is not None
    assert error.param.startswith(named)
    assert named in error.message


def test_a_turn_of_the_model_is_text_thoughts_and_calls() -> None:
    contents = [
        {"role": "model", "parts": [{"text": "Hm. ", "thought": True}, {"text": "I "}]},
        {
            "role": "model",
            "parts": [
                {"text": "look", "thoughtSignature": "QQ=="},
                called("look", {"at": [1, "é"]}, id="c1"),
                {**called("see"), "thoughtSignature": "skip_thought_signature_validator"},
            ],
        },
    ]
    assert history(*contents, {"parts": [responded("look", {}, id="c1")]})[0] == {
        "role": "assistant",
        "content": "I look",
        "reasoning": "Hm. ",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "look", "arguments": '{"at":[1,"é"]}'},
            },
            {"id": "call_1", "type": "function", "function": {"name": "see", "arguments": "{}"}},
        ],
    }
    [message] = history({"role": "model", "parts": [called("look", {"INVALID_JSON": "{a"})]})
    assert message["tool_calls"][0]["function"]["arguments"] == "{a"


def test_responses_answer_calls_by_id_or_else_by_name_and_order() -> None:
    contents = [
        HI,
        {"role": "model", "parts": [called("a", id="c1"), called("b"), called("a"), called("b")]},
        {
            "role": "function",
            "parts": [
                responded("b", {"output": "first"}),
                {"text": "and?"},
                responded("a", {"output": "second"}, id="c1"),
                responded("b", {"error": "third"}),
                responded("a", {"output": 4, "more": None}),
            ],
        },
    ]
    assert parse(contents=contents).messages[2:] == [
        {"role": "tool", "tool_call_id": "call_1", "content": "first"},
        {"role": "tool", "tool_call_id": "c1", "content": "second"},
        {"role": "tool", "tool_call_id": "call_3", "content": '{"error":"third"}'},
        {"role": "tool", "tool_call_id": "call_2", "content": '{"output":4,"more":null}'},
        {"role": "user", "content": "and?"},
    ]


def test_media_pass_through_and_make_the_turn_untrainable() -> None:
    inline = {"inlineData": {"mimeType": "image/png", "data": "-_8"}}
    file = {"fileData": {"mimeType": "video/mp4", "fileUri": "https://x/y.mp4"}}
    audio = {"inlineData": {"mimeType": "audio/wav", "data": "QQ=="}}
    call = parse(
        contents=[
            {"parts": [{"text": "see"}, inline, file]},
            {"role": "model", "parts": [called("hear", id="c")]},
            {"parts": [responded("hear", {"output": "this"}, id="c", parts=[audio])]},
        ]
    )
    assert call.untrainable == "media"
    see, _, heard = call.messages
    assert see["content"] == [
        {"type": "text", "text": "see"},
        # In base64's own alphabet: clients write the one for URLs too.
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,+/8="}},
        {"type": "video_url", "video_url": {"url": "https://x/y.mp4"}},
    ]
    assert heard["content"][1]["audio_url"] == {"url": "data:audio/wav;base64,QQ=="}


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"inlineData": {"mimeType": "application/pdf", "data": "QQ=="}}, "inlineData.mimeType"),
        ({"inlineData": {"mimeType": "image/png", "data": "Q"}}, "inlineData.data"),
        ({"inlineData": {"mimeType": "image/png", "data": "é"}}, "inlineData.data"),
        ({"inlineData": {"data": "QQ=="}}, "inlineData.mimeType"),
        ({"fileData": {"mimeType": "image/png", "fileUri": "gs://b/o"}}, "fileData.fileUri"),
        (
            {
                "fileData": {
                    "mimeType": "image/png",
                    "fileUri": "https://generativelanguage.googleapis.com/v1beta/files/1",
                }
            },
            "fileData.fileUri",
        ),
    ],
)
def test_media_that_cannot_be_served_are_named(part: Json, named: str) -> None:
    assert refused(contents=[{"parts": [part]}]).param == f"contents[0].parts[0].{named}"


def test_response_formats() -> None:
    json_type = {"responseMimeType": "application/json"}
    schema = {"type": "object"}
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "response", "schema": {"type": "object"}},
    }
    assert config(**json_type)["response_format"] == {"type": "json_object"}
    assert config(**json_type, responseSchema={"type": "OBJECT"})["response_format"] == wanted
    assert config(**json_type, responseJsonSchema=schema)["response_format"] == wanted
    assert config(**json_type, _responseJsonSchema=schema)["response_format"] == wanted
    one_of = {"responseMimeType": "text/x.enum", "responseSchema": {"enum": ["a", "b"]}}
    assert config(**one_of)["structured_outputs"] == {"choice": ["a", "b"]}


@pytest.mark.parametrize(
    ("thinking", "effort", "shown"),
    [
        (None, None, False),
        ({"includeThoughts": True}, None, True),
        ({"thinkingBudget": 0}, "none", False),
        ({"thinkingBudget": -1, "includeThoughts": True}, None, True),
        ({"thinkingBudget": 8192}, None, False),
        ({"thinkingLevel": "HIGH"}, "high", False),
        ({"thinkingLevel": "low"}, "low", False),
        ({"thinkingLevel": "THINKING_LEVEL_UNSPECIFIED"}, None, False),
    ],
)
def test_thoughts_are_shown_on_request(thinking: Json, effort: str | None, shown: bool) -> None:
    call = parse(generationConfig={"thinkingConfig": thinking})
    assert call.body.get("reasoning_effort") == effort
    assert call.visible.reasoning is shown


def test_log_probabilities_are_shown_on_request() -> None:
    call = parse(generationConfig={"responseLogprobs": True, "logprobs": 3})
    assert (call.visible.logprobs, call.body["top_logprobs"]) == (True, 3)
    assert not parse().visible.logprobs


def test_tokens_are_counted_of_what_would_be_rendered() -> None:
    alone = count_request(orjson.dumps({"contents": [HI]}), {"model": "m"})
    assert alone.body == {"model": "m", "messages": [USER]}
    inner = {
        "model": "models/m",
        "contents": [HI, {"role": "model", "parts": [{"text": "ho"}]}],
        "tools": [{"functionDeclarations": [{"name": "look"}]}],
    }
    whole = count_request(orjson.dumps({"generateContentRequest": inner}), {"model": "m"})
    assert whole.messages == [USER, {"role": "assistant", "content": "ho"}]
    assert whole.body["tools"] == [{"type": "function", "function": {"name": "look"}}]
    counted = types.CountTokensResponse.model_validate(orjson.loads(count_answer(12)))
    assert counted.total_tokens == 12
