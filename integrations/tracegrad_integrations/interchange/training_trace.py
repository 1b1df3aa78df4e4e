"""OpenEnv's `TrainingTrace`, version 1: the calls of one rollout with exact tokens, out and in.

Its turns have no place for policies, rewards and parents but their `metadata`. There stand a few
names for who reads it, and below `OURS` what format 1 says of the turn, and, in the first one, of
the rollout. TRL's asynchronous GRPO takes such traces; a reward comes to it from its environment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tracegrad.events import Json, Reward, Turn
from tracegrad.store.copy.export_records import RolloutRecord
from tracegrad.store.read.training_samples import agent_turn_indices, turn_of_reward
from tracegrad.transfer.layouts import ExportLayout, ReasonCounter
from tracegrad.transfer.readers import MASKED, ForeignReader, ForeignRollout
from tracegrad.transfer.schema import Number, PolicyVersions, Text, TokenIds
from tracegrad.transfer.serialize import rollout_object
from tracegrad.transfer.validation import InvalidObject, validate
from tracegrad_integrations.interchange.chat_text import request_of, response_of, texts_of
from tracegrad_integrations.interchange.foreign_rollout import (
    SampledTokens,
    TurnObjects,
    dated,
    digest,
    finished_rollout,
    object_in,
    record_of,
    reward_object,
    task_id_of,
    undated,
    with_parsed_columns,
)

VERSION: Literal[1] = 1
OURS = "tracegrad"

_Mask = list[Annotated[int, Meta(ge=0, le=1, description="0 or 1")]]


class TraceTurn(Struct, kw_only=True):
    """`loss_mask` covers prompt and completion; `metadata` is anybody's."""

    node_id: Text
    prompt_token_ids: TokenIds
    completion_token_ids: TokenIds
    per_token_logps: list[Number]
    loss_mask: _Mask
    request: Json = {}
    response: Json = {}
    metadata: Json = {}


class Trace(Struct, kw_only=True):
    schema_version: int
    turns: list[TraceTurn]


class _Versions(Struct):
    policy_versions: PolicyVersions | None = None


def trace_rows(copies: Sequence[RolloutRecord], left_out: ReasonCounter) -> Iterator[Json]:
    for copy in copies:
        named = copy.untrained().without_spans()
        if turns := _eligible(named, left_out):
            yield trace_of(named, turns, left_out)
        else:
            left_out["rollouts: no_turns"] += 1


def trace_of(copy: RolloutRecord, turns: Sequence[Turn], left_out: ReasonCounter) -> Json:
    """Of these turns alone; `copy`: without its spans and what this store did with it."""
    rewards = _remaining_rewards(copy, turns, left_out)
    about = rollout_object(replace(copy, turns=turns, rewards=rewards), text=False)
    details = about.pop("turns")
    texts = texts_of(copy, left_out)
    found = []
    for turn, detail in zip(turns, details, strict=True):
        said = texts.get(turn.turn_id)
        tools = said.tools if said else None
        found.append(
            TraceTurn(
                node_id=turn.turn_id,
                prompt_token_ids=turn.prompt_token_ids.tolist(),
                completion_token_ids=turn.completion_token_ids.tolist(),
                per_token_logps=turn.completion_logprobs.tolist(),
                loss_mask=[0] * len(turn.prompt_token_ids)
                + [int(turn.untrainable is None)] * len(turn.completion_token_ids),
                request=request_of(turn.model, said.prompt, tools) if said else {},
                response=response_of(turn.model, said.reply, turn.finish_reason) if said else {},
                metadata={**_readable(copy, turn), OURS: _ours(detail)},
            )
        )
    found[0].metadata[OURS]["rollout"] = {k: v for k, v in about.items() if v not in (None, [])}
    made = msgspec.to_builtins(Trace(schema_version=VERSION, turns=found))
    assert isinstance(made, dict)
    return made


def _eligible(copy: RolloutRecord, left_out: ReasonCounter) -> list[Turn]:
    """The turns that OpenEnv takes; each continues the nearest one of them."""
    kept: list[Turn] = []
    instead: dict[str, str | None] = {}  # of a turn that is left out: what its children continue
    for turn in copy.turns:
        parent = turn.parent_id
        parent = instead.get(parent, parent) if parent else None
        if (reason := _exclusion(turn)) is not None:
            left_out[f"turns: {reason}"] += 1
            instead[turn.turn_id] = parent
        else:
            kept.append(turn if parent == turn.parent_id else replace(turn, parent_id=parent))
    return kept


def _remaining_rewards(
    copy: RolloutRecord, kept: Sequence[Turn], left_out: ReasonCounter
) -> list[Reward]:
    """A reward counts the turns; here it counts those that are kept. What was given for one of
    the others has no turn any more."""
    known, ids = agent_turn_indices(copy.turns), {turn.turn_id for turn in kept}
    remaining = [index for index in known if copy.turns[index].turn_id in ids]
    places = {index: place for place, index in enumerate(remaining)}
    found = []
    for reward in copy.rewards:
        index = turn_of_reward(reward, known)
        if index is None or reward.turn is None:
            found.append(reward)
        elif (place := places.get(index)) is None:
            left_out["rewards: turn_left_out"] += 1
        else:
            # From the end, where its giver counted so.
            place -= len(places) if reward.turn < 0 else 0
            found.append(replace(reward, turn=place))
    return found


def _exclusion(turn: Turn) -> str | None:
    if not turn.completion_token_ids:
        return "no_tokens"
    if not turn.prompt_token_ids:
        return "no_prompt"
    if not all(map(math.isfinite, turn.completion_logprobs)):
        return "non_finite"
    return "positive_logprob" if max(turn.completion_logprobs) > 0 else None


def _readable(copy: RolloutRecord, turn: Turn) -> Json:
    found = {
        "rollout_id": copy.rollout_id,
        "task_id": copy.task_id,
        "agent": copy.agent,
        "agent_name": turn.agent_name,
        "outcome": copy.outcome,
        "reward": copy.reward,
        "parent_node_id": turn.parent_id,
        "policy_versions": [list(span) for span in turn.policy_versions],
        "finish_reason": turn.finish_reason,
        "sampling_params": turn.sampling,
        "model": turn.model,
        "asked_model": turn.asked_model,
    }
    return {key: value for key, value in found.items() if value is not None}


_IN_TURN = ("turn_id", "new_token_ids", "completion_token_ids", "completion_logprobs")


def _ours(detail: Json) -> Json:
    return {
        key: value
        for key, value in detail.items()
        if key not in _IN_TURN and value not in (None, {}, [])
    }


def is_trace(value: Json) -> bool:
    return {"schema_version", "turns"} <= value.keys() and "kind" not in value


def read_trace(value: Json) -> ForeignRollout:
    """Raises InvalidObject."""
    if value["schema_version"] != VERSION:
        problem = f"{value['schema_version']!r}; this tracegrad reads {VERSION}: update it"
        raise InvalidObject("schema_version", problem)
    value = with_parsed_columns(value, TRAINING_TRACE.columns)
    trace = validate(value, Trace)
    if not trace.turns:
        raise InvalidObject("turns", "it is empty; write one turn or more")
    metadata = trace.turns[0].metadata
    ours = object_in(metadata.get(OURS, {}), f"turns[0].metadata.{OURS}")
    about = object_in(ours.get("rollout", {}), f"turns[0].metadata.{OURS}.rollout")
    rollout_id = str(about.get("rollout_id") or digest(value))
    objects = TurnObjects()
    for number, turn in enumerate(trace.turns):
        _add_turn(objects, turn, f"turns[{number}]", rollout_id)
    in_turn = f".metadata.{OURS}"
    if about:
        return dated(record_of(about, objects, in_turn))
    rewards = [
        reward_object(rollout_id, turn.metadata["reward"], 0.0, f"turns[{n}].metadata.reward")
        for n, turn in enumerate(trace.turns)
        if turn.metadata.get("reward") is not None
    ]
    rest = {turn.node_id: turn.metadata for turn in trace.turns if turn.metadata}
    rollout = finished_rollout(
        rollout_id,
        (0.0, 0.0),
        agent=_text(metadata.get("agent")),
        task_id=_text(metadata.get("task_id")) or _task_id(trace.turns[0]),
        rewards=rewards[-1:],
        task={"training_trace": rest} if rest else None,
    )
    return undated(record_of(rollout, objects, in_turn))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _task_id(first: TraceTurn) -> str:
    messages = first.request.get("messages")
    asked = task_id_of(messages) if isinstance(messages, list) else None
    return asked or digest(first.prompt_token_ids)


def _add_turn(objects: TurnObjects, turn: TraceTurn, where: str, rollout_id: str) -> None:
    tokens = SampledTokens.of(
        turn.prompt_token_ids, turn.completion_token_ids, turn.per_token_logps
    )
    _check(turn, where)
    ours = dict(object_in(turn.metadata.get(OURS, {}), f"{where}.metadata.{OURS}"))
    ours.pop("rollout", None)
    is_ours = "created_at" in ours  # which we say of every turn
    model = str(turn.request.get("model") or ours.get("model") or turn.metadata.get("model") or "")
    found: Json = {"model": model, "dialect": "chat"}
    if not is_ours:
        found |= {
            "turn_id": digest([rollout_id, turn.node_id]),
            "created_at": 0.0,
            "finish_reason": _finish_reason(turn),
            "sampling": turn.metadata.get("sampling_params") or {},
            "agent_name": _text(turn.metadata.get("agent_name")),
            "asked_model": _text(turn.metadata.get("asked_model")),
        }
    found |= ours
    if "policy_versions" not in found and tokens.complete and (spans := _versions_of(turn, where)):
        found["policy_versions"] = spans
    if not all(turn.loss_mask[len(turn.prompt_token_ids) :]):
        # A part of a turn cannot be trained alone.
        found.setdefault("untrainable", MASKED)
    if turn.request and turn.response:
        request = {key: value for key, value in turn.request.items() if value is not None}
        text = {"request": {"model": model, **request}, "response": turn.response}
        found |= {"dialect": "chat", **text}
    if is_ours:
        objects.ours({**found, "turn_id": turn.node_id}, tokens, where, "prompt_token_ids")
    else:
        objects.foreign(found, tokens, where, None)


def _versions_of(turn: TraceTurn, where: str) -> PolicyVersions | None:
    """What we write beside `OURS` too: who passes a trace on may leave that out.

    Raises InvalidObject.
    """
    said = {"policy_versions": turn.metadata.get("policy_versions")}
    try:
        spans = validate(said, _Versions).policy_versions
    except InvalidObject as error:
        problem = str(error).removeprefix(f"{error.field}: ")
        raise InvalidObject(f"{where}.metadata.{error.field}", problem) from None
    sampled = len(turn.completion_token_ids)
    if spans is not None and (covered := sum(count for _, count in spans)) != sampled:
        problem = f"they cover {covered} of {sampled} sampled tokens; cover all"
        raise InvalidObject(f"{where}.metadata.policy_versions", problem)
    return spans


def _check(turn: TraceTurn, where: str) -> None:
    sampled, prompt = len(turn.completion_token_ids), len(turn.prompt_token_ids)
    if (found := len(turn.per_token_logps)) != sampled:
        problem = f"{found} for {sampled} sampled tokens; write one each"
        raise InvalidObject(f"{where}.per_token_logps", problem)
    if (found := len(turn.loss_mask)) != prompt + sampled:
        problem = f"{found} for {prompt} + {sampled} tokens; write one each"
        raise InvalidObject(f"{where}.loss_mask", problem)
    if any(turn.loss_mask[:prompt]):
        raise InvalidObject(f"{where}.loss_mask", "1 in the prompt; write 0: it is context")


def _finish_reason(turn: TraceTurn) -> str | None:
    choices = turn.response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    found = first.get("finish_reason") if isinstance(first, dict) else None
    return _text(found) or _text(turn.metadata.get("finish_reason"))


TRAINING_TRACE = ExportLayout(
    name="openenv-trace",
    reader="openenv.core.harness.TrainingTrace (schema version 1)",
    columns={"schema_version": "integer", "turns": "json"},
    rows=trace_rows,
)
READER = ForeignReader(name="openenv-trace", matches=is_trace, read=read_trace)
