"""Responses API: what an agent sends back is the message that the engine said."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseInputItemParam
from pydantic import TypeAdapter

from support.engines.engine_answers import Said, texts, whole
from support.proxy.openai_responses import DIALECT, PATCH, TOOL, ask, events_of, stream
from tracegrad.proxy.dialects.openai_responses.tools import custom_input_as_arguments

Json = dict[str, Any]
Way = Callable[[Json], Json]

INPUT_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseInputItemParam)
TOOLS = [
    TOOL,
    PATCH,
    {"type": "namespace", "name": "ns", "description": "", "tools": [TOOL, PATCH]},
]
NAMES = ["look", "ns__look", "unknown", "apply_patch", "ns__apply_patch"]


@st.composite
def said(draw: st.DrawFn) -> Said:
    calls = []
    for number in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(NAMES))
        arguments = draw(texts)
        if name.endswith("apply_patch"):
            arguments = custom_input_as_arguments(arguments)
        calls.append((name, arguments, f"call-{number}"))
    return Said(draw(texts), draw(texts), calls)


def as_it_is(item: Json) -> Json:
    return item


def without_reasoning_text(item: Json) -> Json:
    """As older Codex sends it: no ids, and of reasoning only what was sealed."""
    return {k: v for k, v in item.items() if k not in ("id", "status", "content")} | (
        {"content": item["content"]} if item["type"] == "message" else {}
    )


def without_ids(item: Json) -> Json:
    return {k: v for k, v in item.items() if k != "id"}


def through_pydantic(item: Json) -> Json:
    """As agents on OpenAI's client send it: every field, also those that are null."""
    nulls = {"phase": None, "caller": None, "created_by": None}
    return {**item, **nulls}


WAYS = [as_it_is, without_reasoning_text, without_ids, through_pydantic]


@pytest.mark.parametrize("way", WAYS)
@given(say=said(), streamed=st.booleans(), size=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_items_sent_back_are_the_sampled_message(
    way: Way, say: Said, streamed: bool, size: int
) -> None:
    call = ask(tools=TOOLS, include=["reasoning.encrypted_content"], store=False)
    if streamed:
        response = events_of(stream(call, say, size))[-1]["response"]
    else:
        response = json.loads(DIALECT.answer(call, whole(say)))
    results = [
        {"type": "function_call_output", "call_id": call_id, "output": "done"}
        for _, _, call_id in say.calls
    ]
    history = [{"role": "user", "content": "hi"}, *map(way, response["output"]), *results]
    user, message, *after = ask(tools=TOOLS, input=history).messages
    assert user == {"role": "user", "content": "hi"}
    # An answer that says nothing comes back as an empty text.
    assert {**message, "content": message["content"] or None} == say.message
    assert [one["tool_call_id"] for one in after] == [call_id for _, _, call_id in say.calls]


@given(st.lists(said(), min_size=2, max_size=4))
@settings(max_examples=40, deadline=None)
def test_many_turns_stay_apart(says: list[Said]) -> None:
    """Even where no one speaks between them, as in a run that has to go on."""
    history: list[Json] = []
    for say in says:
        call = ask(tools=TOOLS, include=["reasoning.encrypted_content"])
        history += json.loads(DIALECT.answer(call, whole(say)))["output"]
        history += [
            {"type": "function_call_output", "call_id": call_id, "output": "done"}
            for _, _, call_id in say.calls
        ]
    read = [m for m in ask(tools=TOOLS, input=history).messages if m["role"] == "assistant"]
    assert [{**m, "content": m["content"] or None} for m in read] == [s.message for s in says]


@given(said())
@settings(max_examples=40, deadline=None)
def test_output_items_are_input_items_of_openais_types(say: Said) -> None:
    call = ask(tools=TOOLS, include=["reasoning.encrypted_content"])
    for item in json.loads(DIALECT.answer(call, whole(say)))["output"]:
        INPUT_ITEM.validate_python(item)
