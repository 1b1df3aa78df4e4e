"""JSON objects of the format back into what was stored. The inverse of `serialize`.

The schema checks each field, this module what fields say about each other. Every function raises
`InvalidObject`, which names the field. Nothing is guessed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from msgspec import Struct

from tracegrad.events import Reward, RolloutFinished, Span, Turn, logprob_array, token_id_array
from tracegrad.store.copy.export_records import RolloutRecord, VersionRecord
from tracegrad.store.encoding.routed_experts import check_routing
from tracegrad.store.types import PolicyVersion, StepRecord, TurnDisposition
from tracegrad.transfer.chat_conversations import (
    ImportedConversation,
    is_conversation,
    read_conversation,
)
from tracegrad.transfer.readers import ForeignRollout, reader_of
from tracegrad.transfer.schema import (
    FORMAT,
    RolloutObject,
    SpanWithoutRolloutObject,
    StepObject,
    TurnObject,
    VersionObject,
)
from tracegrad.transfer.validation import InvalidObject, validate

ImportedObject = (
    RolloutRecord | ImportedConversation | ForeignRollout | StepRecord | VersionRecord | Span
)


def read_object(value: object) -> ImportedObject:
    """What one line of an export holds, or what comes from elsewhere."""
    known = validate(value, dict[str, Any])
    if is_conversation(known):
        return read_conversation(known)
    version = known.get("tracegrad")
    if version is None:
        if (reader := reader_of(known)) is not None:
            return reader.read(known)
        raise InvalidObject("tracegrad", _why_foreign(known))
    if version != FORMAT:
        raise InvalidObject(
            "tracegrad", f"format {version!r}; this tracegrad reads {FORMAT}: update it"
        )
    kind = known.get("kind")
    if not isinstance(kind, str) or kind not in _READERS:
        raise InvalidObject("kind", f"{kind!r}; write one of {', '.join(_READERS)}")
    return _READERS[kind](value)


def _why_foreign(value: dict[str, Any]) -> str:
    if value.get("turn_id") is not None:
        return "this is a turn of `export --turns`, which is no whole copy; use `export --rollouts`"
    return 'it is missing; import what `export --rollouts` wrote, or objects with "messages"'


def _rollout(value: object) -> RolloutRecord:
    read = validate(value, RolloutObject)
    if (read.outcome is None) != (read.finished_at is None):
        raise InvalidObject("finished_at", "it goes with outcome; write both or neither")
    if read.idle_s is not None and read.finished_at is None:
        raise InvalidObject("idle_s", "it says how an end was found; write finished_at, or neither")
    of: dict[str, Any] = {"rollout_id": read.rollout_id}
    turns = _Turns(read.rollout_id)
    for index, turn in enumerate(read.turns or ()):
        turns.add(turn, f"turns[{index}]")
    return RolloutRecord(
        **_values(read, RolloutRecord)
        | {
            "outcome": read.outcome and read.outcome.value,
            "outcomes": [
                RolloutFinished(**of, **_values(each, RolloutFinished))
                for each in read.outcomes or ()
            ],
            "rewards": [Reward(**of, **_values(each, Reward)) for each in read.rewards or ()],
            "spans": [_span(each, read.rollout_id) for each in read.spans or ()],
            "turns": turns.turns,
            "dispositions": turns.dispositions,
        }
    )


def _span(read: Struct, rollout_id: str | None) -> Span:
    return Span(**{"name": "", "rollout_id": rollout_id} | _values(read, Span))


def _version(value: object) -> VersionRecord:
    read = validate(value, VersionObject)
    return VersionRecord(
        PolicyVersion(**{"step": None} | _values(read, PolicyVersion)),
        [
            PolicyVersion(read.version, **{"step": None} | _values(each, PolicyVersion))
            for each in read.events or ()
        ],
    )


def _values(read: Struct, record: type) -> dict[str, Any]:
    """The fields of the record that the object gives; null is as good as none."""
    given = {each.name: getattr(read, each.name, None) for each in fields(record)}
    return {name: value for name, value in given.items() if value is not None}


_READERS: dict[str, Callable[[object], ImportedObject]] = {
    "rollout": _rollout,
    "step": lambda value: StepRecord(**_values(validate(value, StepObject), StepRecord)),
    "version": _version,
    "span": lambda value: _span(validate(value, SpanWithoutRolloutObject).span, None),
}


class _Turns:
    """The turns of one rollout, read in order: parents come before their children."""

    def __init__(self, rollout_id: str) -> None:
        self._rollout_id = rollout_id
        self._contexts: dict[str, array[int]] = {}
        self.turns: list[Turn] = []
        self.dispositions: dict[str, TurnDisposition] = {}

    def add(self, read: TurnObject, where: str) -> None:
        """`where`: the turn's place in the object, for errors."""
        turn_id = read.turn_id
        if turn_id in self._contexts:
            raise InvalidObject(
                f"{where}.turn_id", f"{turn_id!r} is there twice; give each turn its own"
            )
        prompt = self._prompt(read, where)
        completion = token_id_array(read.completion_token_ids or ())
        self._contexts[turn_id] = context = prompt + completion
        _check_tokens(read, len(completion), len(context), where)
        logprobs = (
            math.nan if value is None else value for value in read.completion_logprobs or ()
        )
        self.turns.append(
            Turn(
                **{"model": ""}
                | _values(read, Turn)
                | {
                    "rollout_id": self._rollout_id,
                    "parent_id": read.parent_turn_id,
                    "prompt_token_ids": prompt,
                    "completion_token_ids": completion,
                    "completion_logprobs": logprob_array(logprobs),
                    "policy_versions": tuple(read.policy_versions or ()),
                }
            )
        )
        if (disposition := _disposition(read, where)) is not None:
            self.dispositions[turn_id] = disposition

    def _prompt(self, read: TurnObject, where: str) -> array[int]:
        new, parent = token_id_array(read.new_token_ids or ()), read.parent_turn_id
        if parent is None:
            return new
        if parent not in self._contexts:
            raise InvalidObject(
                f"{where}.parent_turn_id",
                f"turn {parent!r} is not before it; write parents first",
            )
        return self._contexts[parent] + new


def _check_tokens(read: TurnObject, completion: int, context: int, where: str) -> None:
    """`completion`, `context`: so many tokens were sampled, and stand in prompt and reply."""
    if (found := len(read.completion_logprobs or ())) != completion:
        raise InvalidObject(
            f"{where}.completion_logprobs",
            f"{found} for {completion} sampled tokens; write one each",
        )
    if (covered := sum(count for _, count in read.policy_versions or ())) != completion:
        raise InvalidObject(
            f"{where}.policy_versions",
            f"they cover {covered} of {completion} sampled tokens; cover all",
        )
    if read.routed_experts is not None:
        try:
            check_routing(read.routed_experts, context)
        except ValueError as error:
            raise InvalidObject(f"{where}.routed_experts", f"{error}; leave it out") from None


def _disposition(read: TurnObject, where: str) -> TurnDisposition | None:
    if read.trained_step is None and read.skip_reason is None:
        return None
    if read.trained_step is not None and read.skip_reason is not None:
        raise InvalidObject(f"{where}.skip_reason", "the turn was trained; write one of the two")
    if read.fate_at is None:
        raise InvalidObject(
            f"{where}.fate_at", "it is missing; write when the turn was trained or skipped"
        )
    if read.advantage is not None and read.trained_step is None:
        raise InvalidObject(f"{where}.advantage", "the turn was not trained; leave it out")
    return TurnDisposition(read.trained_step, read.skip_reason, read.fate_at, read.advantage)
