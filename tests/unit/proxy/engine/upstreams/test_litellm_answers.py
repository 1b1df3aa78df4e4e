"""Teachers behind litellm: what they answer is chat completions, whole or as a stream."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json

import pytest

from support.proxy.litellm_provider import (
    CALLS,
    OPENAI_ANSWER,
    STREAM,
    TOOLS,
    USER,
    Json,
    Provider,
    Teacher,
    call,
    chunks,
    whole,
)
from tracegrad.proxy.engine.upstreams.base import TEXT_ONLY

# Without importing it: that is the adapter's, which sees to it that it keeps to itself.
if importlib.util.find_spec("litellm") is None:
    pytest.skip("litellm is not installed", allow_module_level=True)

# A conversation that has been through tools already.
LATER = [
    {"role": "system", "content": "Be brief."},
    USER,
    {
        "role": "assistant",
        "content": None,
        "reasoning": "secret thoughts",
        "tool_calls": [CALLS[0]],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "3"},
]

SAID = [("call_1", "add", {"a": 1}), ("call_2", "stop", {})]


def tool_calls(message: Json) -> list[tuple[str, str, Json]]:
    return [
        (each["id"], each["function"]["name"], json.loads(each["function"]["arguments"]))
        for each in message["tool_calls"]
    ]


async def test_a_whole_answer_is_a_chat_completion_without_tokens(
    provider: Provider, teacher: Teacher
) -> None:
    answer = await whole(teacher(), call(provider, tools=TOOLS))
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (
        0,
        "tool_calls",
        None,
    )
    message = choice["message"]
    assert (message["role"], message["content"]) == ("assistant", "Adding.")
    assert message["reasoning"] == "One and two."
    assert tool_calls(message) == SAID
    counts = {name: answer["usage"][name] for name in OPENAI_ANSWER["usage"]}  # type: ignore[attr-defined]
    assert counts == OPENAI_ANSWER["usage"]
    assert "token_ids" not in choice
    assert "prompt_token_ids" not in answer
    [asked] = provider.engine.asked
    keys = {asked.headers.get("authorization"), asked.headers.get("x-api-key")}
    assert keys & {"Bearer provider-key", "provider-key"}
    assert "tg-r1" not in str(asked.headers)


async def test_a_stream_is_chunks_without_tokens(provider: Provider, teacher: Teacher) -> None:
    reported = await chunks(teacher(), call(provider, tools=TOOLS, **STREAM))
    assert {chunk["object"] for chunk in reported} == {"chat.completion.chunk"}
    *spoken, end, usage = reported
    deltas = [choice["delta"] for chunk in spoken for choice in chunk["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "One and two."
    assert [delta["content"] for delta in deltas if "content" in delta] == ["Add", "ing."]
    joined: dict[int, Json] = {}
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
        known = joined.setdefault(
            piece["index"], {**piece, "function": {"name": "", "arguments": ""}}
        )
        for name, value in piece["function"].items():
            known["function"][name] += value
    assert sorted(joined) == [0, 1]
    assert tool_calls({"tool_calls": [joined[0], joined[1]]}) == SAID
    assert [choice["finish_reason"] for choice in end["choices"]] == ["tool_calls"]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 30
    assert usage["usage"]["completion_tokens"] == 9
    assert provider.asked["stream"] is True


async def test_a_conversation_with_tools_reaches_the_provider_in_its_own_form(
    provider: Provider, teacher: Teacher
) -> None:
    fields = {"temperature": 0.5, "stop": ["END"], "tool_choice": "auto", "n": None}
    await whole(teacher(), call(provider, messages=LATER, tools=TOOLS, **fields))
    asked = provider.asked
    assert asked["model"] == "teacher"
    assert asked["temperature"] == 0.5
    assert "secret thoughts" not in json.dumps(asked), "reasoning is not signed"
    assert "n" not in asked
    if provider.name == "openai":
        assert asked["stop"] == ["END"]
        assert [message["role"] for message in asked["messages"]] == [
            "system",
            "user",
            "assistant",
            "tool",
        ]
        assert asked["messages"][2]["tool_calls"] == [CALLS[0]]
        assert asked["messages"][3]["tool_call_id"] == "call_1"
    else:
        assert asked["stop_sequences"] == ["END"]
        assert "Be brief." in json.dumps(asked["system"])
        use, result = asked["messages"][1]["content"][0], asked["messages"][2]["content"][0]
        assert (use["type"], use["id"], use["input"]) == ("tool_use", "call_1", {"a": 1})
        assert (result["type"], result["tool_use_id"]) == ("tool_result", "call_1")


async def test_the_upstreams_own_model_serves_calls_without_one_and_is_listed(
    provider: Provider, teacher: Teacher
) -> None:
    upstream = teacher(model=provider.model)
    await whole(upstream, json.dumps({"messages": [USER], "max_tokens": 5}).encode())
    assert provider.asked["model"] == "teacher"
    async with upstream.request("GET", "/v1/models", body=None, headers={}) as answer:
        assert [model["id"] for model in json.loads(await answer.read())["data"]] == [
            provider.model
        ]
    assert json.loads(await teacher().models())["data"] == []
    assert upstream.capabilities == TEXT_ONLY
