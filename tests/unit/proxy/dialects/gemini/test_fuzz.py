"""Whatever a Gemini client sends: a call that can be passed on, or a refusal by name."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.proxy.corrupted_bodies import corrupted
from support.proxy.gemini_requests import HI, STREAMED, Json
from tracegrad.chat.call import Call
from tracegrad.proxy.dialects.gemini.request import GeminiDialect, count_request
from tracegrad.proxy.http.errors import BadRequest

PNG = {"inlineData": {"mimeType": "image/png", "data": "QQ=="}}
SCHEMA = {
    "type": "OBJECT",
    "nullable": True,
    "properties": {
        "a": {"type": "STRING", "enum": ["x"], "format": "enum", "maxLength": "3"},
        "b": {"anyOf": [{"type": "ARRAY", "items": {"type": "INTEGER"}}], "nullable": True},
    },
    "propertyOrdering": ["b", "a"],
    "additionalProperties": {"type": "NULL"},
    "defs": {"D": {"ref": "#"}},
}
FULL: Json = {
    "systemInstruction": {"role": "user", "parts": [{"text": "Be brief."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "look"}, PNG]},
        {
            "role": "model",
            "parts": [
                {"text": "Hm.", "thought": True},
                {"text": "I look.", "thoughtSignature": "QQ=="},
                {"functionCall": {"id": "c1", "name": "look", "args": {"at": [1]}}},
                {"functionCall": {"name": "see", "args": {}}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"id": "c1", "name": "look", "response": {"output": "a"}}},
                {"functionResponse": {"name": "see", "response": {"x": 1}, "parts": [PNG]}},
                {"text": "and?"},
                {"fileData": {"mimeType": "image/png", "fileUri": "https://x/y.png"}},
            ],
        },
    ],
    "tools": [
        {
            "functionDeclarations": [
                {"name": "look", "description": "d", "parameters": SCHEMA},
                {"name": "see", "parametersJsonSchema": {"type": "object"}},
                {"name": "hear"},
            ]
        }
    ],
    "toolConfig": {
        "functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look", "see"]}
    },
    "generationConfig": {
        "temperature": 1,
        "topP": 0.95,
        "topK": 64,
        "candidateCount": 1,
        "maxOutputTokens": 100,
        "stopSequences": ["x"],
        "seed": 1,
        "presencePenalty": 0,
        "frequencyPenalty": 0,
        "responseMimeType": "application/json",
        "responseSchema": SCHEMA,
        "responseLogprobs": True,
        "logprobs": 2,
        "responseModalities": ["TEXT"],
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 0},
    },
    "safetySettings": [{"category": "c", "threshold": "t"}],
}
PLAIN: Json = {"contents": [HI]}


def check(raw: bytes) -> Call | BadRequest:
    try:
        call = GeminiDialect().parse(raw, STREAMED, {})
    except BadRequest as error:
        body = orjson.loads(GeminiDialect().error(error))
        assert body["error"]["status"] == "INVALID_ARGUMENT"
        return error
    orjson.dumps(call.body)
    assert all(isinstance(message["role"], str) for message in call.messages)
    return call


def test_the_body_that_is_mangled_is_served() -> None:
    call = check(orjson.dumps(FULL))
    assert isinstance(call, Call)
    roles = ["system", "user", "assistant", "tool", "tool", "user"]
    assert [message["role"] for message in call.messages] == roles


@settings(max_examples=400, deadline=None)
@given(corrupted([FULL, PLAIN]))
def test_a_mangled_body_is_served_or_refused_by_name(body: Any) -> None:
    raw = json.dumps(body).encode()
    outcome = check(raw)
    if isinstance(outcome, BadRequest) and "the body" not in outcome.message:
        assert outcome.param
        assert outcome.param in outcome.message
    for counted in (raw, b'{"generateContentRequest":' + raw + b"}"):
        with suppress(BadRequest):
            orjson.dumps(count_request(counted, STREAMED).body)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
@example(b'{"contents": "\\ud800"}')
@example(b'{"generationConfig": {"temperature": 1e400}}')
@example(b"[" * 5000)
@example(b"\xff\xfe")
@example(b"")
@example(b'{"contents": [{"parts": [{"text"')
def test_bytes_that_are_no_request_are_refused(raw: bytes) -> None:
    assert isinstance(check(raw), BadRequest)


PART = "contents[0].parts[0]"
CALL = "contents[1].parts[0].functionCall"
DECLARED = "tools[0].functionDeclarations[0]"
CONFIG = "generationConfig"


def with_part(part: object) -> Json:
    return {"contents": [{"parts": [part]}]}


def with_call(call: object) -> Json:
    return {"contents": [HI, {"role": "model", "parts": [{"functionCall": call}]}, HI]}


def with_function(function: object) -> Json:
    return {**PLAIN, "tools": [{"functionDeclarations": [function]}]}


def with_config(**fields: object) -> Json:
    return {**PLAIN, CONFIG: fields}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"contents": 1}, "contents"),
        ({"contents": [1]}, "contents[0]"),
        ({"contents": [{"parts": "x"}]}, "contents[0].parts"),
        ({"contents": [{"role": 1, "parts": []}]}, "contents[0].role"),
        (with_part("x"), PART),
        (with_part({"text": 1}), f"{PART}.text"),
        (with_part({"inlineData": "x"}), f"{PART}.inlineData"),
        (with_part({"functionResponse": []}), f"{PART}.functionResponse"),
        (with_part({"functionResponse": {"id": 1}}), f"{PART}.functionResponse.id"),
        (with_part({"functionResponse": {"response": "x"}}), f"{PART}.functionResponse.response"),
        (with_call({"name": 1}), f"{CALL}.name"),
        (with_call({"name": "a", "args": "{}"}), f"{CALL}.args"),
        (with_call({"name": "a", "id": 1}), f"{CALL}.id"),
        (with_call({"args": {}}), f"{CALL}.name"),
        ({**PLAIN, "tools": "x"}, "tools"),
        ({**PLAIN, "tools": [1]}, "tools[0]"),
        (with_function("x"), DECLARED),
        (with_function({"name": ""}), f"{DECLARED}.name"),
        (with_function({"name": "a", "description": 1}), f"{DECLARED}.description"),
        (with_function({"name": "a", "parameters": []}), f"{DECLARED}.parameters"),
        (
            with_function({"name": "a", "parameters": {"items": 1}}),
            f"{DECLARED}.parameters.items",
        ),
        (
            with_function({"name": "a", "parameters": {"minItems": "x"}}),
            f"{DECLARED}.parameters.minItems",
        ),
        (
            with_function({"name": "a", "parameters": {"nullable": 1}}),
            f"{DECLARED}.parameters.nullable",
        ),
        ({**PLAIN, "toolConfig": 1}, "toolConfig"),
        ({**PLAIN, "toolConfig": {"functionCallingConfig": []}}, "toolConfig.functionCalling"),
        ({**PLAIN, "systemInstruction": "x"}, "systemInstruction"),
        ({**PLAIN, "systemInstruction": {"parts": [{}]}}, "systemInstruction.parts[0].text"),
        ({**PLAIN, CONFIG: []}, CONFIG),
        (with_config(temperature="1"), f"{CONFIG}.temperature"),
        (with_config(topK=True), f"{CONFIG}.topK"),
        (with_config(maxOutputTokens=10**30), f"{CONFIG}.maxOutputTokens"),
        (with_config(maxOutputTokens=0), f"{CONFIG}.maxOutputTokens"),
        (with_config(stopSequences=["a", ""]), f"{CONFIG}.stopSequences"),
        (with_config(stopSequences=[1]), f"{CONFIG}.stopSequences[0]"),
        (with_config(seed=0.5), f"{CONFIG}.seed"),
        (with_config(thinkingConfig=1), f"{CONFIG}.thinkingConfig"),
        (
            with_config(thinkingConfig={"thinkingLevel": "MUCH"}),
            f"{CONFIG}.thinkingConfig.thinkingLevel",
        ),
        (
            with_config(thinkingConfig={"includeThoughts": 1}),
            f"{CONFIG}.thinkingConfig.includeThoughts",
        ),
    ],
)
def test_a_field_of_the_wrong_type_is_named(body: Json, named: str) -> None:
    outcome = check(json.dumps(body).encode())
    assert isinstance(outcome, BadRequest)
    assert (outcome.param or "").startswith(named)
