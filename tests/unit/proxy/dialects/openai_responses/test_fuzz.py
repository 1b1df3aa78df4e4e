"""Responses API: whatever is sent is answered or refused, never a fault of ours."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from support.proxy.openai_responses import (
    DIALECT,
    PATCH,
    TOOL,
    Say,
    answer,
    events_of,
    parse,
    stream,
)
from tracegrad.chat.call import Call
from tracegrad.proxy.http.errors import BadRequest

Json = dict[str, Any]

RICH: Json = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "additional_tools", "role": "developer", "tools": [{**TOOL, "name": "more"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "t"}],
            "encrypted_content": "tg1.dA==",
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "apply_patch", "input": "*"},
        {"type": "function_call_output", "call_id": "c", "output": "seen"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": []},
    ],
    "tools": [
        TOOL,
        {**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}},
        {"type": "namespace", "name": "n", "description": "d", "tools": [TOOL]},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "n__look"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "temperature": 1,
    "top_logprobs": 1,
    "max_output_tokens": 5,
    "parallel_tool_calls": True,
    "stream_options": {"include_obfuscation": False},
    "stop": "x",
}

junk: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "function", "custom", "message", "look", "n", "auto", "é\u2028"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "name", "tools", "text", "content", "format", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=5,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the parts of a JSON value are."""
    if not isinstance(value, dict | list):
        return [at]
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [at, *(place for key in keys for place in places(value[key], (*at, key)))]


def planted(value: Any, at: tuple[Any, ...], seed: Any) -> Any:
    """A copy with another part at one place."""
    if not at:
        return seed
    copy = value.copy()
    copy[at[0]] = planted(value[at[0]], at[1:], seed)
    return copy


SPOTS = [place for place in places(RICH) if place]


def test_the_request_to_be_spoilt_is_a_good_one() -> None:
    call = parse(RICH)
    assert len(call.messages) == 6
    assert call.body["tools"][0]["function"]["name"] == "n__look"


def read_or_refused(raw: bytes) -> Call | BadRequest:
    try:
        return DIALECT.parse(raw, {}, {})
    except BadRequest as error:
        return error


@given(st.sampled_from(SPOTS), junk)
@settings(max_examples=400, deadline=None)
def test_a_spoilt_request_is_refused_or_answered(spot: tuple[Any, ...], seed: Any) -> None:
    call = read_or_refused(json.dumps(planted(RICH, spot, seed)).encode())
    if isinstance(call, BadRequest):
        assert call.status == 400
        assert json.loads(DIALECT.error(call))["error"]["param"] == call.param
        return
    say = Say("Hello", "Hm.", [("c", "look", "{}"), ("d", "apply_patch", '{"input": "x"}')])
    whole = Response.model_validate(json.loads(DIALECT.answer(call, answer(say))))
    assert whole.status == "completed"
    assert b"response.completed" in stream(call, say)


@given(st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_bytes_are_refused(raw: bytes) -> None:
    assert isinstance(read_or_refused(raw), BadRequest)


@given(st.lists(junk, min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_items_of_any_shape_are_refused_or_read(items: list[Any]) -> None:
    call = read_or_refused(json.dumps({"input": items}).encode())
    if isinstance(call, BadRequest):
        assert call.param is not None
        assert call.param.startswith("input")
    else:
        assert events_of(stream(call, Say("a")))
