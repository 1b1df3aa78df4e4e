"""The soak's clients speak as the proxy's dialects read, and read what these write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bench.soak.dialects import DIALECTS, Conversation, Dialect, Reply, ToolCall, WrongAnswer

from support.proxy import dialect_adapters
from support.proxy.dialect_adapters import DialectAdapter

CALL = ToolCall("call_1", "stock", '{"item": "lamp", "city": "Oslo"}')
ADAPTERS: dict[str, DialectAdapter] = {
    "chat": dialect_adapters.CHAT,
    "completions": dialect_adapters.COMPLETIONS,
    "responses": dialect_adapters.RESPONSES,
    "anthropic": dialect_adapters.ANTHROPIC,
    "gemini": dialect_adapters.GEMINI,
}
CHATTING = [dialect for dialect in DIALECTS if dialect.name != "completions"]


def named(dialect: Dialect) -> str:
    return dialect.name


def read(dialect: Dialect, talk: Conversation) -> Any:
    body = json.dumps(dialect.body(talk, stream=False)).encode()
    adapter = ADAPTERS[dialect.name]
    return adapter.dialect.parse(body, adapter.path, {})


@pytest.mark.parametrize("dialect", CHATTING, ids=named)
def test_a_conversation_with_a_tool_is_read_as_one(dialect: Dialect) -> None:
    talk = Conversation(tools=True, messages=["how many?", Reply("a", "", (CALL,), 5), ["17"]])
    call = read(dialect, talk)
    assert [message["role"] for message in call.messages] == ["user", "assistant", "tool"]
    [asked] = call.messages[1]["tool_calls"]
    assert asked["function"]["name"] == "stock"
    assert json.loads(asked["function"]["arguments"]) == CALL.parsed
    assert "17" in str(call.messages[2]["content"])


@pytest.mark.parametrize("dialect", CHATTING, ids=named)
def test_a_conversation_goes_on_behind_a_reply(dialect: Dialect) -> None:
    talk = Conversation(tools=False, messages=["hi", Reply("a", "lamp", (), 5), "and?"])
    call = read(dialect, talk)
    assert [message["role"] for message in call.messages] == ["user", "assistant", "user"]


def test_a_text_grows() -> None:
    [dialect] = [one for one in DIALECTS if one.name == "completions"]
    talk = Conversation(tools=False, messages=["a ", Reply("x", "b ", (), 1), "c"])
    assert dialect.body(talk, stream=True)["prompt"] == "a b c"


def test_a_response_names_the_one_before_it() -> None:
    [dialect] = [one for one in DIALECTS if one.name == "responses"]
    talk = Conversation(tools=True, by_reference=True, messages=["hi"])
    assert "previous_response_id" not in dialect.body(talk, stream=False)
    talk.messages += [Reply("resp_1", "", (CALL,), 5), ["17"]]
    body = dialect.body(talk, stream=False)
    assert body["previous_response_id"] == "resp_1"
    assert body["input"] == [{"type": "function_call_output", "call_id": "call_1", "output": "17"}]


@pytest.mark.parametrize("dialect", DIALECTS, ids=named)
def test_a_stream_without_its_end_is_no_answer(dialect: Dialect) -> None:
    with pytest.raises(WrongAnswer):
        dialect.stream().reply(done=False)


def test_arguments_that_were_cut_are_none() -> None:
    assert ToolCall("c", "stock", '{"item": "la').parsed == {}
