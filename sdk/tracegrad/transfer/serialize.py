"""What is stored as JSON objects, version 1 of the format (docs/transfer.md).

Log-probabilities are float32. JSON has no word for some of them: `null` is not a number, and a
number beyond float32 (`±1e39`) is infinite, which is what reading it as float32 makes of it.
"""

from __future__ import annotations

import math
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from tracegrad.events import Json, Reward, Span, Turn
from tracegrad.store.copy.export_records import RolloutRecord, VersionRecord
from tracegrad.store.types import StepRecord, TurnDisposition

FORMAT = 1
_BEYOND_FLOAT32 = 1e39


def rollout_object(copy: RolloutRecord, *, text: bool = True) -> Json:
    """One whole rollout; `text=False` leaves requests and responses out."""
    return {
        "tracegrad": FORMAT,
        "kind": "rollout",
        "rollout_id": copy.rollout_id,
        "opened": copy.opened,
        "opened_at": copy.opened_at,
        "task_id": copy.task_id,
        "agent": copy.agent,
        "tags": dict(copy.tags),
        "task": copy.task,
        "outcome": copy.outcome,
        "error": copy.error,
        "finished_at": copy.finished_at,
        "consumed_at": copy.consumed_at,
        "consumed_step": copy.consumed_step,
        "outcomes": [
            {"outcome": str(end.outcome), "error": end.error, "finished_at": end.finished_at}
            for end in copy.outcomes
        ],
        "rewards": [_reward_object(reward) for reward in copy.rewards],
        "spans": [_span_object(span) for span in copy.spans],
        "turns": _turns(copy, text=text),
    }


def turn_objects(copy: RolloutRecord, *, trained: bool | None = None) -> Iterator[Json]:
    """One flat object a turn, whole prompts in it; `trained`: only turns that were, or were not."""
    reward = copy.reward
    for turn in copy.turns:
        fate = copy.dispositions.get(turn.turn_id)
        step = fate.step if fate else None
        if trained is not None and trained != (step is not None):
            continue
        yield {
            "turn_id": turn.turn_id,
            "parent_turn_id": turn.parent_id,
            "rollout_id": turn.rollout_id,
            "task_id": copy.task_id,
            "agent": copy.agent,
            "outcome": copy.outcome,
            "reward": reward,
            "dialect": turn.dialect,
            "model": turn.model,
            "prompt_token_ids": turn.prompt_token_ids.tolist(),
            "completion_token_ids": turn.completion_token_ids.tolist(),
            "completion_logprobs": logprobs_json(turn.completion_logprobs),
            "policy_versions": [list(span) for span in turn.policy_versions],
            "finish_reason": turn.finish_reason,
            "created_at": turn.created_at,
            "trained_step": step,
            "skip_reason": fate.skip_reason if fate else None,
        }


def step_object(step: StepRecord) -> Json:
    return {"tracegrad": FORMAT, "kind": "step", **asdict(step)}


def version_object(version: VersionRecord) -> Json:
    events = [asdict(event) for event in version.events]
    for event in events:
        del event["version"]
    return {
        "tracegrad": FORMAT,
        "kind": "version",
        **asdict(version.current),
        "events": events,
    }


def span_without_rollout_object(span: Span) -> Json:
    """A span that belongs to no rollout."""
    return {"tracegrad": FORMAT, "kind": "span", "span": _span_object(span)}


def logprobs_json(values: array[float]) -> Sequence[float | None]:
    found = values.tolist()
    if math.isfinite(math.fsum(found)):
        return found
    return [_logprob_json(value) for value in found]


def _logprob_json(value: float) -> float | None:
    if math.isnan(value):
        return None
    return math.copysign(_BEYOND_FLOAT32, value) if math.isinf(value) else value


def _span_object(span: Span) -> Json:
    return {
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "parent_span_id": span.parent_span_id,
        "name": span.name,
        "kind": span.kind,
        "start_ns": span.start_ns,
        "end_ns": span.end_ns,
        "status": span.status,
        "attributes": span.attributes,
    }


def _reward_object(reward: Reward) -> Json:
    found: Json = {
        "reward_id": reward.reward_id,
        "value": reward.value,
        "name": reward.name,
        "turn": reward.turn,
        "source": reward.source,
        "created_at": reward.created_at,
    }
    beside = {"label": reward.label, "given_at": reward.given_at}
    return found | {name: value for name, value in beside.items() if value is not None}


def _turns(copy: RolloutRecord, *, text: bool) -> list[Json]:
    found = []
    contexts: dict[str | None, int] = {None: 0}  # their lengths
    for turn in copy.turns:
        # The prompt's tokens that the parent's prompt and completion lack.
        new = turn.prompt_token_ids[contexts[turn.parent_id] :]
        found.append(_turn_object(turn, new, copy.dispositions.get(turn.turn_id), text=text))
        contexts[turn.turn_id] = len(turn.prompt_token_ids) + len(turn.completion_token_ids)
    return found


def _turn_object(turn: Turn, new: array[int], fate: TurnDisposition | None, *, text: bool) -> Json:
    found: Json = {
        "turn_id": turn.turn_id,
        "parent_turn_id": turn.parent_id,
        "fork_reason": turn.fork_reason,
        "dialect": turn.dialect,
        "model": turn.model,
        "new_token_ids": new.tolist(),
        "completion_token_ids": turn.completion_token_ids.tolist(),
        "completion_logprobs": logprobs_json(turn.completion_logprobs),
        "policy_versions": [list(span) for span in turn.policy_versions],
        "sampling": turn.sampling,
        "finish_reason": turn.finish_reason,
        "untrainable": turn.untrainable,
        "parent_span_id": turn.parent_span_id,
        "created_at": turn.created_at,
        "trained_step": fate.step if fate else None,
        "skip_reason": fate.skip_reason if fate else None,
        "fate_at": fate.created_at if fate else None,
    }
    found |= {
        name: value
        for name in ("state_key", "observation")
        if (value := getattr(turn, name)) is not None
    }
    if turn.routed_experts is not None:
        found["routed_experts"] = b64encode(turn.routed_experts).decode()
    if text:
        found |= {"request": turn.request, "response": turn.response}
    return found
