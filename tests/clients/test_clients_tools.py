"""Tools and structured output with the vendors' libraries, there and back."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from support.engines.mock_engine import MODEL, Answer, Json
from support.engines.prompt_driven_engine import PromptDrivenEngine
from support.proxy.proxy_with_engine import ProxyWithEngine, assert_all_recorded
from support.proxy.vendor_calls import CHAT, CHATTING, CLAUDE, MESSAGES, RESPONSES, Vendor

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMES = ("get_weather", "get_trains")
RAIN = "Is there rain in 'Ghent'? Ask get_weather."
BOTH = "get_weather of 'Ghent', get_trains of 'Bruges'"


def tools_of(vendor: Vendor) -> list[Json]:
    if vendor is CLAUDE:
        return [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    functions = [{"name": name, "parameters": SCHEMA, "strict": False} for name in NAMES]
    if vendor is CHAT:
        return [{"type": "function", "function": function} for function in functions]
    return [{"type": "function", **function} for function in functions]


def asked(vendor: Vendor, text: str, **more: Any) -> Json:
    said: Json = {"messages": [{"role": "user", "content": text}]}
    said = {"input": said["messages"]} if vendor is RESPONSES else said
    return vendor.args | said | {"tools": tools_of(vendor)} | more


def calls_of(answer: Any) -> list[tuple[str, str, Json]]:
    """Each call's id, name and arguments, from a whole answer of any of the libraries."""
    if hasattr(answer, "choices"):
        calls = answer.choices[0].message.tool_calls or []
        return [
            (call.id, call.function.name, json.loads(call.function.arguments)) for call in calls
        ]
    if hasattr(answer, "output"):
        items = [item for item in answer.output if item.type == "function_call"]
        return [(item.call_id, item.name, json.loads(item.arguments)) for item in items]
    blocks = [block for block in answer.content if block.type == "tool_use"]
    return [(block.id, block.name, block.input) for block in blocks]


def next_args(vendor: Vendor, args: Json, answer: Any, results: list[str]) -> Json:
    """The next call of an agent that ran the tools, as the libraries' own examples write it."""
    ids = [call_id for call_id, _, _ in calls_of(answer)]
    pairs = list(zip(ids, results, strict=True))
    if vendor is CHAT:
        said = [answer.choices[0].message]
        said += [{"role": "tool", "tool_call_id": i, "content": result} for i, result in pairs]
        return args | {"messages": args["messages"] + said}
    if vendor is RESPONSES:
        outputs = [
            {"type": "function_call_output", "call_id": i, "output": result} for i, result in pairs
        ]
        return args | {"input": [*args["input"], *answer.output, *outputs]}
    blocks = [{"type": "tool_result", "tool_use_id": i, "content": result} for i, result in pairs]
    said = [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": blocks},
    ]
    return args | {"messages": args["messages"] + said}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("vendor", CHATTING, ids=str)
def test_parallel_calls_and_their_results_make_one_conversation(
    vendor: Vendor, rig: ProxyWithEngine, engine: PromptDrivenEngine, stream: bool
) -> None:
    args = asked(vendor, BOTH)
    with vendor.client(rig) as client:
        answer = vendor.streamed(client, args) if stream else vendor.create(client)(**args)
        calls = calls_of(answer)
        assert [call[1:] for call in calls] == [
            ("get_weather", {"city": "Ghent"}),
            ("get_trains", {"city": "Bruges"}),
        ]
        final = vendor.create(client)(**next_args(vendor, args, answer, ["rain", "at 9:01"]))
    assert vendor.text(final) == "Hello to you, who said: at 9:01"

    user, assistant, *results = engine.requests[1]["messages"]
    assert user == {"role": "user", "content": BOTH}
    assert [(call["id"], call["function"]["name"]) for call in assistant["tool_calls"]] == [
        call[:2] for call in calls
    ]
    assert [(each["tool_call_id"], each["content"]) for each in results] == [
        (calls[0][0], "rain"),
        (calls[1][0], "at 9:01"),
    ]
    assert_all_recorded(engine, rig.turns())
    assert rig.turns()[1].parent_id == rig.turns()[0].turn_id


# What each dialect calls the choices of a tool.
CHOICES: dict[str, Json] = {
    "chat": {
        "must": {"tool_choice": "required"},
        "none": {"tool_choice": "none"},
        "named": {"tool_choice": {"type": "function", "function": {"name": "get_trains"}}},
        "one": {"parallel_tool_calls": False},
    },
    "responses": {
        "must": {"tool_choice": "required"},
        "none": {"tool_choice": "none"},
        "named": {"tool_choice": {"type": "function", "name": "get_trains"}},
        "one": {"parallel_tool_calls": False},
    },
    "messages": {
        "must": {"tool_choice": {"type": "any"}},
        "none": {"tool_choice": {"type": "none"}},
        "named": {"tool_choice": {"type": "tool", "name": "get_trains"}},
        "one": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    },
}


@pytest.mark.parametrize(
    ("choice", "prompt", "names"),
    [
        ("must", "Hello!", ["get_weather"]),
        ("none", BOTH, []),
        ("named", "Hello!", ["get_trains"]),
        ("one", BOTH, ["get_weather"]),
    ],
)
@pytest.mark.parametrize("vendor", CHATTING, ids=str)
async def test_the_choice_of_a_tool_is_kept_to(
    vendor: Vendor, rig: ProxyWithEngine, choice: str, prompt: str, names: list[str]
) -> None:
    async with vendor.async_client(rig) as client:
        args = asked(vendor, prompt, **CHOICES[vendor.name][choice])
        answer = await vendor.create(client)(**args)
    assert [name for _, name, _ in calls_of(answer)] == names
    assert bool(vendor.text(answer)) is not bool(names)


class Trip(BaseModel):
    """Where to, and how many."""

    city: str
    people: int
    stops: list[str]


TRIP = Trip(city="Ghent", people=3, stops=["Bruges"])
PLAN = "A trip to 'Ghent' for 3, by 'Bruges'"


def planned(vendor: Vendor) -> Json:
    said = [{"role": "user", "content": PLAN}]
    return vendor.args | ({"input": PLAN} if vendor is RESPONSES else {"messages": said})


@pytest.mark.parametrize("vendor", CHATTING, ids=str)
async def test_a_pydantic_model_is_parsed_of_a_whole_answer(
    vendor: Vendor, rig: ProxyWithEngine
) -> None:
    async with vendor.async_client(rig) as client:
        if vendor is CHAT:
            answer = await client.chat.completions.parse(**planned(CHAT), response_format=Trip)
            parsed = answer.choices[0].message.parsed
        elif vendor is RESPONSES:
            parsed = (
                await client.responses.parse(**planned(RESPONSES), text_format=Trip)
            ).output_parsed
        else:
            parsed = (
                await client.messages.parse(**planned(CLAUDE), output_format=Trip)
            ).parsed_output
    assert parsed == TRIP
    [turn] = rig.turns()
    assert turn.untrainable == "constrained"


@pytest.mark.parametrize("vendor", CHATTING, ids=str)
def test_a_pydantic_model_is_parsed_of_a_stream(vendor: Vendor, rig: ProxyWithEngine) -> None:
    with vendor.client(rig) as client:
        if vendor is CHAT:
            with client.chat.completions.stream(**planned(CHAT), response_format=Trip) as events:
                parsed = events.get_final_completion().choices[0].message.parsed
        elif vendor is RESPONSES:
            with client.responses.stream(**planned(RESPONSES), text_format=Trip) as events:
                parsed = events.get_final_response().output_parsed
        else:
            with client.messages.stream(**planned(CLAUDE), output_format=Trip) as events:
                parsed = events.get_final_message().parsed_output
    assert parsed == TRIP


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_is_not_parsed(rig: ProxyWithEngine, stream: bool) -> None:
    """OpenAI's library looks at the finish reason first."""
    args = planned(CHAT) | {"max_tokens": 3, "response_format": Trip}
    with CHAT.client(rig) as client:
        ask = CHAT.streamed if stream else _parsed
        with pytest.raises(openai.LengthFinishReasonError):
            ask(client, args)


def _parsed(client: openai.OpenAI, args: Json) -> object:
    return client.chat.completions.parse(**args)


def test_a_tool_of_a_pydantic_model_has_its_arguments_parsed(rig: ProxyWithEngine) -> None:
    tool = openai.pydantic_function_tool(Trip)
    said = [{"role": "user", "content": f"Plan a Trip: {PLAN}"}]
    with CHAT.client(rig) as client:
        answer = client.chat.completions.parse(model=MODEL, messages=said, tools=[tool])
        with client.chat.completions.stream(model=MODEL, messages=said, tools=[tool]) as events:
            told = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    [call] = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == TRIP
    assert [event.parsed_arguments for event in told] == [TRIP]


def test_a_custom_tool_of_responses_gets_its_text(
    rig: ProxyWithEngine, engine: PromptDrivenEngine
) -> None:
    engine.replies.append(Answer("", [("write", '{"input": "a line\\nanother"}')]))
    tool = {"type": "custom", "name": "write"}
    with RESPONSES.client(rig) as client:
        response = client.responses.create(model=MODEL, input="Write.", tools=[tool])
    [call] = response.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "write", "a line\nanother")


def test_a_tool_result_without_its_call_is_the_engines_to_refuse(rig: ProxyWithEngine) -> None:
    lost = [*MESSAGES, {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]
    with CHAT.client(rig) as client, pytest.raises(openai.BadRequestError, match="call_1"):
        client.chat.completions.create(model=MODEL, messages=lost)
