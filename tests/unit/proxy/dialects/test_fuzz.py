"""Whatever a client of a dialect sends: a call that can be passed on and answered, or a refusal
by name."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from support.engines.engine_answers import Said, streamed, whole
from support.proxy.corrupted_bodies import JUNK, corrupted
from support.proxy.dialect_adapters import (
    ANTHROPIC,
    EVERY_DIALECT,
    GEMINI,
    RESPONSES,
    DialectAdapter,
)
from support.proxy.openai_responses import events_of
from tracegrad.chat.call import Call
from tracegrad.proxy.http.errors import BadRequest

Json = dict[str, Any]

every_dialect = pytest.mark.parametrize("of", EVERY_DIALECT, ids=str)
SAMPLED = Said("Hello", "Hm.", [("look", "{}"), ("apply_patch", '{"input": "x"}')])


def answer_whole_and_streamed(of: DialectAdapter, call: Call) -> tuple[bytes, bytes]:
    writer = of.dialect.writer(call)
    going_on, ending = streamed(SAMPLED)
    body = writer.begin(None) + b"".join(map(writer.chunk, going_on)) + writer.end(ending)
    return of.dialect.answer(call, whole(SAMPLED)), body


@every_dialect
def test_the_body_that_is_mangled_is_served(of: DialectAdapter) -> None:
    call = of.parse(orjson.dumps(of.full))
    assert isinstance(call, Call)
    assert " ".join(message["role"] for message in call.messages) == of.roles


def test_a_function_of_a_namespace_is_among_the_tools_of_a_response() -> None:
    call = RESPONSES.parse(orjson.dumps(RESPONSES.full))
    assert isinstance(call, Call)
    assert call.body["tools"][0]["function"]["name"] == "n__look"


@every_dialect
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_mangled_body_is_answered_or_refused_by_name(
    of: DialectAdapter, data: st.DataObject
) -> None:
    raw = json.dumps(data.draw(corrupted([of.full, of.plain]))).encode()
    outcome = of.parse(raw)
    if isinstance(outcome, Call):
        body, stream = answer_whole_and_streamed(of, outcome)
        if of is RESPONSES:
            assert Response.model_validate_json(body).status == "completed"
            assert b"response.completed" in stream
    elif "the body" not in outcome.message:
        assert outcome.param
        assert outcome.param in outcome.message
    for count in of.counts:
        with suppress(BadRequest):
            orjson.dumps(count(raw).body)


@every_dialect
@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=60))
@example(raw=b'{"model": "\\ud800"}')
@example(raw=b'{"contents": "\\ud800"}')
@example(raw=b'{"input": "\\ud800"}')
@example(raw=b'{"input": 1e999}')
@example(raw=b"[]")
@example(raw=b'"x"')
@example(raw=b'{"max_tokens": 1e400}')
@example(raw=b'{"generationConfig": {"temperature": 1e400}}')
@example(raw=b"[" * 5000)
@example(raw=b"\xff\xfe")
@example(raw=b"")
@example(raw=b'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content"')
@example(raw=b'{"contents": [{"parts": [{"text"')
def test_bytes_that_are_no_request_are_refused(of: DialectAdapter, raw: bytes) -> None:
    assert isinstance(of.parse(raw), BadRequest)


@given(st.lists(JUNK, min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_response_items_of_any_shape_are_refused_or_read(items: list[Any]) -> None:
    outcome = RESPONSES.parse(json.dumps({"input": items}).encode())
    if isinstance(outcome, Call):
        assert events_of(answer_whole_and_streamed(RESPONSES, outcome)[1])
    elif "the body" not in outcome.message:
        assert (outcome.param or "").startswith("input")


ANTHROPIC_WRONG: dict[str, list[Any]] = {
    "model": [1, [], {}],
    "max_tokens": ["9", 1.5, True, -1, 2**63, 10**30, []],
    "stream": ["true", 1, []],
    "system": [1, {}, ["x"], [{"type": "image"}], [{"type": "text", "text": 1}]],
    "messages": ["x", {}, [], [None], ["x"], [{}], [{"role": "user"}], [{"role": 1}]],
    "tools": ["x", {}, ["x"], [{"name": 1}], [{"name": "a", "input_schema": []}]],
    "tool_choice": ["auto", [], {}, {"type": 1}, {"type": "some"}, {"type": "tool"}],
    "thinking": [True, [], {}, {"type": 1}, {"type": "enabled", "budget_tokens": "x"}],
    "output_config": [1, [], {"effort": 1}, {"format": []}, {"format": {"type": "json_schema"}}],
    "output_format": ["json", [], {"type": "json_schema", "schema": []}],
    "context_management": [1, [], {"edits": {}}, {"edits": [1]}, {"edits": [{"type": "x"}]}],
    "chat_template_kwargs": [1, "x", []],
    "stop_sequences": [1, "x", {}, [1], [None]],
    "temperature": ["1", True, []],
    "top_p": ["1", True, {}],
    "top_k": ["1", True, 0.5, 10**30],
}


[_HI] = GEMINI.plain["contents"]
PART = "contents[0].parts[0]"
CALL = "contents[1].parts[0].functionCall"
DECLARED = "tools[0].functionDeclarations[0]"
CONFIG = "generationConfig"


def with_part(part: object) -> Json:
    return {"contents": [{"parts": [part]}]}


def with_call(call: object) -> Json:
    return {"contents": [_HI, {"role": "model", "parts": [{"functionCall": call}]}, _HI]}


def with_function(function: object) -> Json:
    return {**GEMINI.plain, "tools": [{"functionDeclarations": [function]}]}


def with_config(**fields: object) -> Json:
    return {**GEMINI.plain, CONFIG: fields}


GEMINI_WRONG: list[tuple[Json, str]] = [
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
    ({**GEMINI.plain, "tools": "x"}, "tools"),
    ({**GEMINI.plain, "tools": [1]}, "tools[0]"),
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
    ({**GEMINI.plain, "toolConfig": 1}, "toolConfig"),
    ({**GEMINI.plain, "toolConfig": {"functionCallingConfig": []}}, "toolConfig.functionCalling"),
    ({**GEMINI.plain, "systemInstruction": "x"}, "systemInstruction"),
    ({**GEMINI.plain, "systemInstruction": {"parts": [{}]}}, "systemInstruction.parts[0].text"),
    ({**GEMINI.plain, CONFIG: []}, CONFIG),
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
]
WRONG = [
    (ANTHROPIC, {**ANTHROPIC.plain, "tools": ANTHROPIC.full["tools"], name: wrong}, name)
    for name, each in ANTHROPIC_WRONG.items()
    for wrong in each
] + [(GEMINI, body, named) for body, named in GEMINI_WRONG]


@pytest.mark.parametrize(("of", "body", "named"), WRONG)
def test_a_field_of_the_wrong_type_is_named(of: DialectAdapter, body: Json, named: str) -> None:
    outcome = of.parse(json.dumps(body).encode())
    assert isinstance(outcome, BadRequest)
    assert (outcome.param or "").startswith(named)
