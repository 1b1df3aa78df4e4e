"""What replies did, read from recorded turns; the hacks that Cursor described among them: a tool
call that cannot be carried out escapes a negative reward, a question is safer than an edit."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from tracegrad.events import Turn
from tracegrad_trainer.guards.behaviour import Behaviour, behaviour_of
from tracegrad_trainer.guards.config import GuardSettings

EDIT = {
    "type": "function",
    "function": {
        "name": "edit_file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
            "required": ["path"],
        },
    },
}


def turn(reply: dict[str, Any], *, tools: bool = True, tokens: int = 3) -> Turn:
    request: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Rename x."}]}
    if tools:
        request["tools"] = [EDIT]
    return Turn(
        rollout_id="r",
        dialect="chat",
        model="m",
        prompt_token_ids=array("i", [1, 2]),
        completion_token_ids=array("i", range(tokens)),
        completion_logprobs=array("f", [-0.5] * tokens),
        policy_versions=((1, tokens),),
        request=request,
        response={"choices": [{"message": {"role": "assistant", **reply}}]},
    )


def said(text: str, **more: Any) -> Turn:
    return turn({"content": text}, **more)


def called(arguments: str, name: str = "edit_file", **more: Any) -> Turn:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return turn({"content": None, "tool_calls": [call]}, **more)


def behaviour(*turns: Turn) -> Behaviour:
    return behaviour_of(turns, GuardSettings().refusals)


@pytest.mark.parametrize(
    ("arguments", "name", "invalid"),
    [
        ('{"path": "a.py", "line": 3}', "edit_file", False),
        ('{"path": "a.py"', "edit_file", True),  # cut off
        ('{"line": 3}', "edit_file", True),  # what is required is missing
        ('{"path": "a.py", "line": "three"}', "edit_file", True),
        ('{"path": "a.py"}', "delete_everything", True),
        ("", "edit_file", True),
    ],
)
def test_calls_that_cannot_be_carried_out(arguments: str, name: str, invalid: bool) -> None:
    assert behaviour(called(arguments, name), said("Done.")).invalid_tool_calls is invalid


def test_nothing_can_be_said_of_calls_without_tools() -> None:
    assert behaviour(said("Hello.", tools=False)).invalid_tool_calls is None


def test_broken_schema_is_the_agents_own() -> None:
    broken = called('{"path": 1}')
    assert broken.request is not None
    broken.request["tools"] = [
        {"type": "function", "function": EDIT["function"] | {"parameters": {"type": 5}}}
    ]  # type: ignore[operator]
    assert behaviour(broken).invalid_tool_calls is False


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("Should I rename it in tests too?", True),
        ('Did you mean "x"?"', True),
        ("What is x? It is renamed.", False),
        ("Renamed.", False),
    ],
)
def test_questions_instead_of_edits(text: str, question: bool) -> None:
    assert behaviour(said(text)).questions is question


def test_a_call_is_no_question() -> None:
    assert (
        behaviour(
            turn(
                {
                    "content": "Shall we?",
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "edit_file", "arguments": "{}"},
                        }
                    ],
                }
            )
        ).questions
        is False
    )


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I cannot edit files.", True),
        ("Unfortunately I am not able to do this.", True),
        ("As an AI language model, I have no files.", True),
        ("The variable can't be renamed twice, so I renamed it once.", False),
        ("Renamed.", False),
    ],
)
def test_refusals(text: str, refusal: bool) -> None:
    assert behaviour(said(text)).refusals is refusal


@pytest.mark.parametrize(
    ("turns", "no_op"),
    [
        ([said("")], True),
        ([said("  \n")], True),
        ([called('{"path": "a"}'), called('{"path": "a"}')], True),
        ([called('{"path": "a"}'), called('{"path": "b"}')], False),
        ([called('{"path": "a"}'), said("Done."), called('{"path": "a"}')], False),
        ([said("Done."), said("Done.")], False),
    ],
)
def test_no_ops(turns: list[Turn], no_op: bool) -> None:
    assert behaviour(*turns).no_ops is no_op


def test_tokens_are_of_the_longest_reply() -> None:
    assert behaviour(said("a", tokens=3), said("b", tokens=4)).reply_tokens == 4


def test_turns_without_text_say_nothing() -> None:
    bare = said("a")
    bare = Turn(
        **{name: getattr(bare, name) for name in bare.__slots__}
        | {"request": None, "response": None}
    )
    assert behaviour(bare) == Behaviour(None, None, None, None, 3)
