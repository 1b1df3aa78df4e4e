"""Whatever a Messages client sends: a call that can be passed on, or a refusal by name."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.proxy.corrupted_bodies import corrupted
from tracegrad.chat.call import Call
from tracegrad.proxy.dialects.anthropic.request import AnthropicDialect, count_request
from tracegrad.proxy.http.errors import BadRequest

Json = dict[str, Any]

PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="}}
FULL: Json = {
    "model": "m",
    "max_tokens": 100,
    "stream": True,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "look"}, PNG]},
        {"role": "system", "content": "It is late.", "clear_at": "never"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": [1]}},
                {"type": "tool_use", "id": "c2", "name": "find", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "a"}, PNG],
                    "is_error": False,
                },
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "tool_reference", "tool_name": "deep"}],
                },
                {"type": "text", "text": "and?"},
            ],
        },
    ],
    "tools": [
        {"name": "look", "description": "d", "input_schema": {"type": "object"}, "strict": True},
        {"name": "find", "type": "custom", "input_schema": {"type": "object"}},
        {"name": "deep", "input_schema": {"type": "object"}, "defer_loading": True},
    ],
    "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2048},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stop_sequences": ["x"],
    "temperature": 1,
    "top_p": 0.5,
    "top_k": 5,
    "metadata": {"user_id": "u"},
    "chat_template_kwargs": {"enable_thinking": True},
}
PLAIN: Json = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


def check(raw: bytes) -> Call | BadRequest:
    try:
        call = AnthropicDialect().parse(raw, {}, {})
    except BadRequest as error:
        body = orjson.loads(AnthropicDialect().error(error))
        assert body["error"]["type"] == "invalid_request_error"
        return error
    orjson.dumps(call.body)
    assert all(isinstance(message["role"], str) for message in call.messages)
    return call


def test_the_body_that_is_mangled_is_served() -> None:
    call = check(orjson.dumps(FULL))
    assert isinstance(call, Call)
    assert [m["role"] for m in call.messages] == [
        "system",
        "user",
        "system",
        "assistant",
        "tool",
        "tool",
        "user",
    ]


@settings(max_examples=400, deadline=None)
@given(corrupted([FULL, PLAIN]))
def test_a_mangled_body_is_served_or_refused_by_name(body: Any) -> None:
    raw = json.dumps(body).encode()
    outcome = check(raw)
    if isinstance(outcome, BadRequest) and "the body" not in outcome.message:
        assert outcome.param
        assert outcome.param in outcome.message
    with suppress(BadRequest):
        orjson.dumps(count_request(raw, {}).body)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
@example(b'{"model": "\\ud800"}')
@example(b'{"max_tokens": 1e400}')
@example(b"[" * 5000)
@example(b"\xff\xfe")
@example(b"")
@example(b'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content"')
def test_bytes_that_are_no_request_are_refused(raw: bytes) -> None:
    assert isinstance(check(raw), BadRequest)


WRONG: dict[str, list[Any]] = {
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


@pytest.mark.parametrize(("name", "wrong"), [(n, w) for n, each in WRONG.items() for w in each])
def test_a_field_of_the_wrong_type_is_named(name: str, wrong: object) -> None:
    body = {**PLAIN, "tools": FULL["tools"], name: wrong}
    outcome = check(json.dumps(body).encode())
    assert isinstance(outcome, BadRequest)
    assert (outcome.param or "").startswith(name)
