"""The conversations that the templates are tried on: what came before, the reply, what is new."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def says(text: str | None = None, calls: Sequence[Json] = (), reasoning: str = "") -> Json:
    reply: Json = {"role": "assistant", "content": text}
    if reasoning:
        reply["reasoning"] = reasoning
    if calls:
        reply["tool_calls"] = list(calls)
    return reply


def call(number: int, **arguments: Any) -> Json:
    """Ids of nine characters: Mistral's templates want them so."""
    function = {"name": "stock", "arguments": json.dumps(arguments)}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def result(number: int, text: str) -> Json:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": "stock", "content": text}


SYSTEM = {"role": "system", "content": "You are a careful shop assistant."}
TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "stock",
            "description": "How many there are.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "description": "which thing"},
                    "city": {"type": "string", "description": "in which shop"},
                },
                "required": ["item"],
            },
        },
    }
]

ASK, ASK_MORE = user("How many lamps are in Oslo?"), user("Which of them are red?")
CALL, CALL_TOO = call(1, item="lamp", city="Oslo"), call(2, item="lamp", city="Bergen")
FOUND, FOUND_TOO = result(1, "17 pieces"), result(2, "4 pieces")
ANSWER, WHY, WHY_NOW = "There are 17 lamps.", "I should look it up first.", "Now the other city."


@dataclass(frozen=True)
class Cell:
    before: list[Json]
    reply: Json
    new: list[Json]
    tools: list[Json] | None = None

    @property
    def last_said(self) -> str:
        """Text that ends the reply's own part of a prompt, and occurs nowhere after it."""
        calls = self.reply.get("tool_calls")
        if not calls:
            return str(self.reply["content"])
        arguments = json.loads(calls[-1]["function"]["arguments"])
        return str(list(arguments.values())[-1])


_START = [SYSTEM, ASK]
_LOOP = [*_START, says(calls=[CALL]), FOUND]
_THOUGHT_LOOP = [*_START, says(calls=[CALL], reasoning=WHY), FOUND]

CELLS = {
    "text": Cell(_START, says(ANSWER), [ASK_MORE]),
    "text, tools": Cell(_START, says(ANSWER), [ASK_MORE], TOOLS),
    "call": Cell(_START, says(calls=[CALL]), [FOUND], TOOLS),
    "parallel": Cell(_START, says(calls=[CALL, CALL_TOO]), [FOUND, FOUND_TOO], TOOLS),
    "R call": Cell(_START, says(calls=[CALL], reasoning=WHY), [FOUND], TOOLS),
    "R loop": Cell(_THOUGHT_LOOP, says(calls=[CALL_TOO], reasoning=WHY_NOW), [FOUND_TOO], TOOLS),
    "loop": Cell(_LOOP, says(calls=[CALL_TOO]), [FOUND_TOO], TOOLS),
    "R→user": Cell(_START, says(ANSWER, reasoning=WHY), [ASK_MORE]),
    "calls→user": Cell(_START, says(calls=[CALL, CALL_TOO]), [FOUND, FOUND_TOO, ASK_MORE], TOOLS),
    "loop→user": Cell(_LOOP, says(ANSWER), [ASK_MORE], TOOLS),
    "R loop→user": Cell(_THOUGHT_LOOP, says(ANSWER, reasoning=WHY_NOW), [ASK_MORE], TOOLS),
}
