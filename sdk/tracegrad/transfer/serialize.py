"""What is stored as JSON objects of `schema`.

Log-probabilities are float32. JSON has no word for some of them: `null` is not a number, and a
number beyond float32 (`±1e39`) is infinite, which is what reading it as float32 makes of it.
"""

from __future__ import annotations

import math
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from tracegrad.events import Json, Span, Turn
from tracegrad.store.copy.export_records import RolloutRecord, VersionRecord
from tracegrad.store.types import StepRecord, TurnDisposition
from tracegrad.transfer.schema import (
    FORMAT,
    OMITTED_IF_NONE,
    FlatTurnObject,
    OutcomeObject,
    RewardObject,
    RolloutObject,
    SpanObject,
    StepObject,
    TurnObject,
    VersionEventObject,
    VersionObject,
)

_BEYOND_FLOAT32 = 1e39


def rollout_object(copy: RolloutRecord, *, text: bool = True) -> Json:
    """One whole rollout; `text=False` leaves requests and responses out."""
    return _object(
        RolloutObject,
        copy,
        tracegrad=FORMAT,
        kind="rollout",
        held_out=copy.held_out or None,
        tags=dict(copy.tags),
        outcomes=[_object(OutcomeObject, end, outcome=end.outcome.value) for end in copy.outcomes],
        rewards=[_object(RewardObject, reward) for reward in copy.rewards],
        spans=[_object(SpanObject, span) for span in copy.spans],
        turns=_turns(copy, text=text),
    )


def turn_objects(copy: RolloutRecord, *, trained: bool | None = None) -> Iterator[Json]:
    """One flat object a turn, whole prompts in it; `trained`: only turns that were, or were not."""
    reward = copy.reward
    for turn in copy.without_spans().turns:
        given = _given(turn, copy.dispositions.get(turn.turn_id))
        if trained is not None and trained != (given["trained_step"] is not None):
            continue
        yield _fields(
            FlatTurnObject,
            turn,
            task_id=copy.task_id,
            agent=copy.agent,
            outcome=copy.outcome,
            reward=reward,
            prompt_token_ids=turn.prompt_token_ids.tolist(),
            **given,
        )


def step_object(step: StepRecord) -> Json:
    return _object(StepObject, step, tracegrad=FORMAT, kind="step")


def version_object(version: VersionRecord) -> Json:
    events = [_object(VersionEventObject, event) for event in version.events]
    return _object(VersionObject, version.current, tracegrad=FORMAT, kind="version", events=events)


def span_without_rollout_object(span: Span) -> Json:
    return {"tracegrad": FORMAT, "kind": "span", "span": _object(SpanObject, span)}


def logprobs_json(values: array[float]) -> Sequence[float | None]:
    found = values.tolist()
    if math.isfinite(math.fsum(found)):
        return found
    return [_logprob_json(value) for value in found]


def _logprob_json(value: float) -> float | None:
    if math.isnan(value):
        return None
    return math.copysign(_BEYOND_FLOAT32, value) if math.isinf(value) else value


def _fields(schema: type[Struct], record: object, **given: Any) -> Json:
    """The schema's fields in order: those that are given, else those of the record."""
    return {
        name: given[name] if name in given else getattr(record, name)
        for name in schema.__struct_fields__
    }


def _object(schema: type[Struct], record: object, **given: Any) -> Json:
    """As an object of a copy."""
    found = _fields(schema, record, **given)
    for name in OMITTED_IF_NONE & found.keys():
        if found[name] is None:
            del found[name]
    return found


def _turns(copy: RolloutRecord, *, text: bool) -> list[Json]:
    objects = []
    contexts: dict[str | None, int] = {None: 0}  # their lengths
    for turn in copy.turns:
        disposition = copy.dispositions.get(turn.turn_id)
        routing = turn.routed_experts
        found = _object(
            TurnObject,
            turn,
            # The prompt's tokens that the parent's prompt and completion lack.
            new_token_ids=turn.prompt_token_ids[contexts[turn.parent_id] :].tolist(),
            fate_at=disposition.created_at if disposition else None,
            routed_experts=None if routing is None else b64encode(routing).decode(),
            **_given(turn, disposition),
        )
        if not text:
            del found["request"], found["response"]
        objects.append(found)
        contexts[turn.turn_id] = len(turn.prompt_token_ids) + len(turn.completion_token_ids)
    return objects


def _given(turn: Turn, disposition: TurnDisposition | None) -> Json:
    """What both forms of a turn write in their own way."""
    return {
        "parent_turn_id": turn.parent_id,
        "completion_token_ids": turn.completion_token_ids.tolist(),
        "completion_logprobs": logprobs_json(turn.completion_logprobs),
        "policy_versions": [list(span) for span in turn.policy_versions],
        "trained_step": disposition.step if disposition else None,
        "skip_reason": disposition.skip_reason if disposition else None,
        "advantage": disposition.advantage if disposition else None,
    }
