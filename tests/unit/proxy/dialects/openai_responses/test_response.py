"""Responses API: whole answers, checked with OpenAI's types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response

from support.engines.engine_answers import Said
from support.engines.engine_answers import whole as engine_answer
from support.proxy.openai_responses import (
    DIALECT,
    PATCH,
    TOOL,
    answer,
    ask,
    check_response,
)
from tracegrad.chat.call import Call

Json = dict[str, Any]

NAMESPACE = {"type": "namespace", "name": "eyes", "description": "To see.", "tools": [TOOL, PATCH]}


def whole(call: Call, say: Said, **reported: Any) -> Response:
    return check_response(DIALECT.answer(call, {**engine_answer(say), **reported}))


def test_a_text_is_a_message() -> None:
    call = ask(instructions="Be brief.", temperature=0.5, metadata={"a": "b"})
    usage = Said().usage | {"prompt_tokens_details": {"cached_tokens": 4}}
    response = whole(call, Said("Hello"), usage=usage)
    assert response.id == f"resp_{call.turn_id}"
    assert response.output_text == "Hello"
    assert (response.status, response.model) == ("completed", "m")
    assert (response.instructions, response.temperature) == ("Be brief.", 0.5)
    assert response.metadata == {"a": "b"}
    assert response.top_p == 1.0
    assert response.error is None
    assert response.incomplete_details is None
    assert response.completed_at is not None
    [message] = response.output
    assert (message.id, message.status) == (f"msg_{call.turn_id}", "completed")
    assert response.usage.model_dump(exclude_none=True) == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 18,
    }


def test_reasoning_text_and_calls_are_items_in_this_order() -> None:
    call = ask(tools=[TOOL])
    calls = [("look", '{"at":  "it"}', "c1"), ("look", "{", "c2")]
    response = whole(call, Said("Let me.", "Hm.", calls))
    thought, message, first, second = response.output
    assert thought.id == f"rs_{call.turn_id}"
    assert thought.content[0].text == "Hm."
    assert thought.encrypted_content is None
    assert message.content[0].text == "Let me."
    assert (first.id, first.call_id, first.arguments) == (
        f"fc_{call.turn_id}",
        "c1",
        '{"at":  "it"}',
    )
    assert (second.id, second.call_id, second.arguments) == (f"fc_{call.turn_id}_1", "c2", "{")
    assert {item.status for item in response.output} == {"completed"}


def test_the_request_is_repeated_in_openais_form() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    bare = {"type": "function", "name": "bare"}
    call = ask(
        tools=[bare, PATCH, NAMESPACE],
        tool_choice={"type": "function", "name": "bare"},
        text={"format": form, "verbosity": "low"},
        reasoning={"effort": "high", "summary": "auto"},
        previous_response_id="resp_" + "0" * 32,
        max_output_tokens=5,
    )
    response = whole(call, Said("{}"))
    assert [tool.type for tool in response.tools] == ["function", "custom", "namespace"]
    assert response.tools[0].strict is False
    assert response.tool_choice.name == "bare"
    assert response.text.format.name == "n"
    # As applied, not as asked for: nothing here knows of verbosity or of summaries.
    assert response.text.verbosity == "medium"
    assert (response.reasoning.effort, response.reasoning.summary) == ("high", None)
    assert response.previous_response_id == "resp_" + "0" * 32
    assert response.max_output_tokens == 5


def test_a_call_of_a_custom_tool_has_the_text_as_its_input() -> None:
    say = Said(calls=[("apply_patch", '{"input": "*** Begin\\n\\u00e9"}', "c1")])
    call = ask(tools=[PATCH])
    [item] = whole(call, say).output
    assert (item.type, item.id, item.call_id) == ("custom_tool_call", f"ctc_{call.turn_id}", "c1")
    assert (item.name, item.input) == ("apply_patch", "*** Begin\né")


def test_calls_in_a_namespace_have_its_name_and_their_own() -> None:
    calls = [("eyes__look", "{}", "c1"), ("eyes__apply_patch", '{"input":"x"}', "c2")]
    function, custom = whole(ask(tools=[NAMESPACE]), Said(calls=calls)).output
    assert (function.type, function.namespace, function.name) == ("function_call", "eyes", "look")
    assert (custom.type, custom.namespace, custom.name) == (
        "custom_tool_call",
        "eyes",
        "apply_patch",
    )


def test_a_call_of_an_unknown_tool_keeps_its_name() -> None:
    [item] = whole(ask(tools=[TOOL]), Said(calls=[("eyes__peek", "{}", "c1")])).output
    assert (item.type, item.name, item.namespace) == ("function_call", "eyes__peek", None)


def test_sealed_reasoning_is_for_those_who_include_it() -> None:
    call = ask(include=["reasoning.encrypted_content"], store=False)
    [item, _] = whole(call, Said("a", "Grübeln")).output
    assert item.encrypted_content
    sent_back = {"type": "reasoning", "summary": [], "encrypted_content": item.encrypted_content}
    [message] = ask(input=[sent_back]).messages
    assert message["reasoning"] == "Grübeln"


@pytest.mark.parametrize(
    ("finish_reason", "why"),
    [("length", "max_output_tokens"), ("content_filter", "content_filter")],
)
def test_a_cut_answer_is_incomplete_and_so_is_its_last_item(finish_reason: str, why: str) -> None:
    response = whole(ask(), Said("Half an ans", "Hm.", finish=finish_reason))
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == why
    assert response.completed_at is None
    assert [item.status for item in response.output] == ["completed", "incomplete"]


def test_an_answer_that_the_engine_gave_up_has_failed() -> None:
    response = whole(ask(), Said("Half an ans", finish="abort"))
    assert response.status == "failed"
    assert response.error.code == "server_error"


def test_an_answer_that_says_nothing_is_an_empty_message() -> None:
    [item] = whole(ask(), Said()).output
    assert (item.type, item.content[0].text) == ("message", "")


def test_reasoning_alone_is_no_message() -> None:
    [item] = whole(ask(), Said(reasoning="Hm.", finish="length")).output
    assert (item.type, item.status) == ("reasoning", "incomplete")


def test_an_answer_without_usage_leaves_it_out() -> None:
    assert whole(ask(), Said("a"), usage=None).usage is None


def test_the_engines_name_stands_where_the_client_gave_none() -> None:
    call = DIALECT.parse(b'{"input": "hi"}', {}, {})
    assert whole(call, Said("a")).model == "engine"


def entry(token: str, logprob: float, top: tuple[str, ...] = ()) -> Json:
    return {
        "token": token,
        "logprob": logprob,
        "bytes": list(token.encode()),
        "top_logprobs": [{"token": t, "logprob": -9.0, "bytes": None} for t in top],
    }


def test_logprobs_are_those_of_the_text_alone() -> None:
    call = ask(include=["message.output_text.logprobs"], top_logprobs=2)
    tokens = ["<think>", "Yes", "</think>", "\n\n", "Yes", " it", " is", "<|im_end|>"]
    entries = [entry(token, -float(place), ("a", "é")) for place, token in enumerate(tokens)]
    response = check_response(DIALECT.answer(call, answer(Said("Yes it is", "Yes"), entries)))
    reported = response.output[1].content[0].logprobs
    assert [(one.token, one.logprob) for one in reported] == [
        ("Yes", -4.0),
        (" it", -5.0),
        (" is", -6.0),
    ]
    assert [top.token for top in reported[0].top_logprobs] == ["a", "é"]
    assert reported[0].top_logprobs[1].bytes == list("é".encode())
    assert response.top_logprobs == 2


def test_the_body_is_json_of_one_line() -> None:
    body = DIALECT.answer(ask(), engine_answer(Said("a")))
    assert json.loads(body)["object"] == "response"
    assert b"\n" not in body
