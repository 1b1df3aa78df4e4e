"""Rollouts to be stored: tokens, requests and responses as agents' calls have them.

What takes long to make is a `script`: it is made once. A rollout is a script whose turns have
ids of their own; arrays and texts are the script's, which nobody changes.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from functools import cache
from typing import Any

from bench.proxy.calls import MODEL, Prompt
from bench.proxy.text import END, ROLES, encode, passage, pieces, render
from tracegrad.events import Json, RolloutStarted, Turn, logprob_array, new_id, token_id_array

# So many different scripts of a shape take turns, where nothing else is said.
SCRIPTS = 8
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 512}


@dataclass(frozen=True, slots=True)
class Shape:
    """Rollouts of one kind; lengths in tokens.

    Each turn continues the one before with `said` new tokens, or, where that is None, is a
    conversation of its own with a prompt of `prompt` tokens.
    """

    name: str
    prompt: int  # of the first turn
    sampled: int
    said: int | None
    turns: int

    @property
    def unique_tokens(self) -> int:
        """Of a rollout: those that no earlier turn has."""
        later = self.prompt if self.said is None else self.said
        return self.prompt + later * (self.turns - 1) + self.sampled * self.turns

    @property
    def words(self) -> str:
        if self.said is None:
            return (
                f"{self.name}: {self.prompt:,} + {self.sampled} tokens, {self.turns} of a rollout"
            )
        return (
            f"{self.name}: {self.prompt:,} + {self.sampled} tokens, then {self.said} +"
            f" {self.sampled} more, {self.turns} turns"
        )


SHORT = Shape("short", 200, 64, None, 8)
LONG = Shape("long", 16_384, 512, 128, 20)
AGENT = Shape("agent", 400, 64, 64, 5)
# Its last context has some 8,000 tokens.
BATCH = Shape("batch", 2_000, 200, 110, 20)
# Of what a store grows by in months only the number matters.
SMALL = Shape("small", 24, 16, 8, 10)


@dataclass(frozen=True, slots=True)
class Call:
    prompt: array[int]
    reply: array[int]
    logprobs: array[float]
    request: Json
    response: Json


@dataclass(frozen=True, slots=True)
class Rollout:
    opened: RolloutStarted
    turns: tuple[Turn, ...]


def rollout(
    shape: Shape,
    number: int,
    *,
    texts: bool = True,
    scripts: int = SCRIPTS,
    common: Json | None = None,
) -> Rollout:
    """A new one by the script of this number; without `texts` its turns have tokens only.

    `common` comes first in each of its requests.
    """
    opened = RolloutStarted(
        rollout_id=new_id(), task_id=f"task {number}", agent="bench", tags={"split": "train"}
    )
    turns: list[Turn] = []
    for call in script(shape, number % scripts):
        continues = turns and shape.said is not None
        turn = Turn(
            rollout_id=opened.rollout_id,
            parent_id=turns[-1].turn_id if continues else None,
            dialect="chat",
            model=MODEL,
            prompt_token_ids=call.prompt,
            completion_token_ids=call.reply,
            completion_logprobs=call.logprobs,
            policy_versions=((3, len(call.reply)),),
            sampling=_SAMPLING,
            finish_reason="stop",
            request={**(common or {}), **call.request} if texts else None,
            response=call.response if texts else None,
        )
        turns.append(turn)
    return Rollout(opened, tuple(turns))


@cache
def script(shape: Shape, number: int) -> tuple[Call, ...]:
    """The calls of a rollout, in order."""
    calls: list[Call] = []
    messages: list[Json] = []
    ids = token_id_array()
    for turn in range(shape.turns):
        if not calls or shape.said is None:
            messages = Prompt(shape.prompt, number * shape.turns + turn).messages
            ids = token_id_array(render(messages))
        else:
            said = "".join(passage(shape.said - 3, f"said {shape.name} {number} {turn}"))
            messages = [*messages, {"role": "user", "content": said}]
            ids = ids + token_id_array([ROLES["user"], *encode(said), END, ROLES["assistant"]])
        text = _text(shape.sampled - 1, f"reply {shape.name} {number} {turn}")
        reply = token_id_array([*encode(text), END])
        calls.append(
            Call(ids, reply, _logprobs(len(reply), text), _request(messages), _response(text))
        )
        messages = [*messages, {"role": "assistant", "content": text}]
        ids = ids + reply
    return tuple(calls)


def instructions(seed: str, tools: int = 25) -> Json:
    """What an agent says with each call, whatever its task is: about 74 kB."""
    described = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": "".join(passage(320, f"{seed} tool {number}")),
                "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
            },
        }
        for number in range(tools)
    ]
    return {"system": "".join(passage(7_000, f"{seed} system")), "tools": described}


def _text(tokens: int, seed: str) -> str:
    # A few more, as pieces may merge where passages meet.
    return "".join(pieces("".join(passage(tokens + 64, seed)))[:tokens])


def _logprobs(count: int, seed: str) -> array[float]:
    """Most tokens are nearly sure and some are not, as in samples at temperature 1."""
    chance = random.Random(seed)
    return logprob_array(-(abs(chance.gauss(0, 1)) ** 3) / 4 - 1e-6 for _ in range(count))


def _request(messages: list[Json]) -> Json:
    return {"model": MODEL, "messages": messages, "max_tokens": 512, "temperature": 1.0}


def _response(text: str) -> Json:
    """A chat completion without what the arrays hold already, as the proxy stores it."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return {
        "id": f"chatcmpl-{new_id()}",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [choice],
        "usage": {"prompt_tokens": 0, "total_tokens": 0, "completion_tokens": 0},
    }
