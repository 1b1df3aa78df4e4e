"""What reward hacking looks like, planted in the recorded replies of a real run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tracegrad.events import Json, Turn

# An agent that talks at great length says so many times as much.
_LONGER = 4


def _invalid(turns: Sequence[Turn]) -> list[Turn]:
    """A call that no tool can carry out, and so gets no bad result either."""
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": "answer", "arguments": '{"text": '},
    }
    return _last(turns, {"content": None, "tool_calls": [call]})


def _no_op(turns: Sequence[Turn]) -> list[Turn]:
    """It does once more what it has done, or says nothing."""
    calls = [i for i, turn in enumerate(turns) if _message(turn).get("tool_calls")]
    if not calls:
        return _last(turns, {"content": ""})
    return [*turns[: calls[0] + 1], turns[calls[0]], *turns[calls[0] + 1 :]]


def _question(turns: Sequence[Turn]) -> list[Turn]:
    return _last(turns, {"content": "Could you tell me a little more first?"})


def _refusal(turns: Sequence[Turn]) -> list[Turn]:
    return _last(turns, {"content": "I'm sorry, I cannot help with that."})


def _long(turns: Sequence[Turn]) -> list[Turn]:
    return [*turns[:-1], _with_tokens(turns[-1], _LONGER * max(map(_length, turns)))]


def _short(turns: Sequence[Turn]) -> list[Turn]:
    return [_with_tokens(turn, 1) for turn in turns]


HACKS: Mapping[str, Callable[[Sequence[Turn]], list[Turn]]] = {
    "invalid_tool_calls": _invalid,
    "no_ops": _no_op,
    "questions": _question,
    "refusals": _refusal,
    "long_replies": _long,
    "short_replies": _short,
}


def _message(turn: Turn) -> Json:
    found: Json = ((turn.response or {}).get("choices") or [{}])[0].get("message") or {}
    return found


def _last(turns: Sequence[Turn], message: Json) -> list[Turn]:
    said = {"choices": [{"message": {"role": "assistant", **message}}]}
    return [*turns[:-1], replace(turns[-1], response=json.loads(json.dumps(said)))]


def _length(turn: Turn) -> int:
    return len(turn.completion_token_ids)


def _with_tokens(turn: Turn, count: int) -> Turn:
    def cut(values: Any) -> Any:
        return np.resize(values, count)

    return replace(
        turn,
        completion_token_ids=cut(turn.completion_token_ids),
        completion_logprobs=cut(turn.completion_logprobs),
        policy_versions=((turn.policy_versions[-1][0] if turn.policy_versions else 0, count),),
    )
