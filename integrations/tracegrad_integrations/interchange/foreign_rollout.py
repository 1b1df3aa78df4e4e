"""What others recorded, as an object of our own format 1: foreign turns become ours here.

Turns with the tokens of prompt and reply and a log-probability each can be trained; all others are
text (`no_tokens`). Nobody else says which policy sampled, so their tokens count as version 0's, the
one before any training, where the file does not say more.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from tracegrad.events import Json, Outcome, is_reward, token_id_array
from tracegrad.jsonutil import encode_json
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.transfer.chat_conversations import NO_TOKENS
from tracegrad.transfer.deserialize import read_object
from tracegrad.transfer.layouts import Column
from tracegrad.transfer.readers import ForeignRollout
from tracegrad.transfer.schema import FORMAT
from tracegrad.transfer.validation import InvalidObject
from tracegrad.turn_tree import find_parent

UNKNOWN_VERSION = 0


def digest(value: Any) -> str:
    return hashlib.blake2b(encode_json(value), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Of one call. `logprobs` may hold None, where one is not a number."""

    prompt_token_ids: array[int]
    completion_token_ids: array[int]
    logprobs: Sequence[float | None]

    @classmethod
    def of(
        cls,
        prompt: Sequence[int] | None,
        completion: Sequence[int] | None,
        logprobs: Sequence[float | None] | None,
    ) -> SampledTokens:
        return cls(token_id_array(prompt or ()), token_id_array(completion or ()), logprobs or ())

    @property
    def complete(self) -> bool:
        return bool(self.prompt_token_ids and self.completion_token_ids and self.logprobs)


NO_SAMPLED_TOKENS = SampledTokens.of(None, None, None)


@dataclass(frozen=True, slots=True)
class _Known:
    turn_id: str
    prompt_token_ids: array[int]
    completion_token_ids: array[int]


@dataclass(slots=True)
class TurnObjects:
    """`turns` as format 1 has them, in order, and where each stood in the file."""

    turns: list[Json] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    _known: dict[str, _Known] = field(default_factory=dict)

    def foreign(self, turn: Json, tokens: SampledTokens, where: str, after: str | None) -> None:
        """`after`: the turn that it follows in its conversation."""
        if not tokens.complete:
            turn = {"untrainable": NO_TOKENS, **turn}
            tokens = NO_SAMPLED_TOKENS
            follows = self._known.get(after or "")
            textual = follows is not None and not follows.completion_token_ids
            parent = after if textual else None
        else:
            versions = [[UNKNOWN_VERSION, len(tokens.completion_token_ids)]]
            turn = {"policy_versions": versions, **turn}
            sampled = [each for each in self._known.values() if each.completion_token_ids]
            found = find_parent(tokens.prompt_token_ids, sampled)
            parent = found.turn_id if found else None
        self.ours({**turn, "parent_turn_id": parent}, tokens, where, "prompt_token_ids")

    def ours(self, turn: Json, tokens: SampledTokens, where: str, prompt_field: str) -> None:
        """A turn that says which one it continues. Raises InvalidObject."""
        prompt, parent = tokens.prompt_token_ids, self._known.get(turn.get("parent_turn_id") or "")
        start = 0
        if parent is not None:
            context = parent.prompt_token_ids + parent.completion_token_ids
            start = len(context)
            if prompt[:start] != context:
                raise InvalidObject(
                    f"{where}.{prompt_field}",
                    f"they do not begin with the tokens of turn {parent.turn_id!r}, which it "
                    "continues; write the whole prompt",
                )
        self.turns.append(
            {
                **turn,
                "new_token_ids": prompt[start:].tolist(),
                "completion_token_ids": tokens.completion_token_ids.tolist(),
                "completion_logprobs": list(tokens.logprobs),
            }
        )
        self.places.append(where)
        known = _Known(str(turn.get("turn_id")), prompt, tokens.completion_token_ids)
        self._known[known.turn_id] = known


def check_logprobs(tokens: SampledTokens, where: str) -> None:
    """Raises InvalidObject."""
    found, wanted = len(tokens.logprobs), len(tokens.completion_token_ids)
    if found and found != wanted:
        raise InvalidObject(where, f"{found} for {wanted} sampled tokens; write one each")


def task_id_of(messages: Sequence[Any]) -> str | None:
    """Attempts at the same task begin with the same words of users: they form a group. None: no
    user said anything."""
    given = [message for message in messages if isinstance(message, dict)]
    opening = takewhile(lambda message: message.get("role") != "assistant", given)
    asked = [message.get("content") for message in opening if message.get("role") == "user"]
    return digest(asked) if asked else None


def with_parsed_columns(value: Json, columns: Mapping[str, Column]) -> Json:
    """A row of a table, where what is nested stands as JSON text. Raises InvalidObject."""
    found = dict(value)
    for name, column in columns.items():
        if column == "json" and isinstance(text := value.get(name), str):
            try:
                found[name] = json.loads(text)
            except ValueError:
                raise InvalidObject(name, "it is a text and no JSON; write objects") from None
    return found


def object_in(value: Any, where: str) -> Json:
    if not isinstance(value, dict):
        raise InvalidObject(where, "write an object")
    return value


def reward_object(rollout_id: str, value: Any, at: float, where: str) -> Json:
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_reward(value):
        raise InvalidObject(where, f"{value!r}; write a finite number from -1,000,000 to 1,000,000")
    return {
        "reward_id": digest([rollout_id, "reward", value]),
        "value": float(value),
        "name": "reward",
        "source": "import",
        "created_at": at,
    }


def finished_rollout(rollout_id: str, at: tuple[float, float], **about: Any) -> Json:
    """An object of format 1, without its turns; `at`: when it began and ended."""
    opened, finished = at
    end = {"outcome": Outcome.COMPLETED.value, "finished_at": finished}
    return {
        "tracegrad": FORMAT,
        "kind": "rollout",
        "rollout_id": rollout_id,
        "opened_at": opened,
        **end,
        "outcomes": [end],
        **{key: value for key, value in about.items() if value},
    }


def record_of(rollout: Json, turns: TurnObjects, in_turn: str) -> RolloutRecord:
    """Raises InvalidObject, which names places as the file has them; `in_turn`: where a turn there
    has our fields."""
    try:
        found = read_object({**rollout, "turns": turns.turns})
    except InvalidObject as error:
        raise _at_its_place(error, turns.places, in_turn) from None
    assert isinstance(found, RolloutRecord)
    return found


def _at_its_place(error: InvalidObject, places: Sequence[str], in_turn: str) -> InvalidObject:
    if not error.field.startswith("turns["):
        return error
    number, _, rest = error.field.removeprefix("turns[").partition("]")
    problem = str(error).removeprefix(f"{error.field}: ")
    return InvalidObject(f"{places[int(number)]}{in_turn}{rest}", problem)


def undated(record: RolloutRecord) -> ForeignRollout:
    """One that says nothing of the time: it has the time of its first import."""

    def at(now: float) -> RolloutRecord:
        return replace(
            record,
            opened_at=now,
            finished_at=now,
            outcomes=[replace(end, finished_at=now) for end in record.outcomes],
            rewards=[replace(reward, created_at=now) for reward in record.rewards],
            turns=[replace(turn, created_at=now) for turn in record.turns],
        )

    return ForeignRollout(record.rollout_id, at)


def dated(record: RolloutRecord) -> ForeignRollout:
    return ForeignRollout(record.rollout_id, lambda _: record)
