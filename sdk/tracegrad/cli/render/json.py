"""Rollouts as JSON objects. Scripts depend on these names."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tracegrad.cli.render.turn import rewards_of_turn
from tracegrad.events import Turn
from tracegrad.store import RolloutDetail, RolloutSummary, TurnDisposition


def summary_json(row: RolloutSummary) -> dict[str, Any]:
    return asdict(row)


def detail_json(detail: RolloutDetail, *, tokens: bool) -> dict[str, Any]:
    """Token ids and log-probabilities only with `tokens`: they are most of the bytes."""
    return {
        **summary_json(detail.summary),
        "task": detail.task,
        "rewards": [asdict(reward) for reward in detail.rewards],
        "turns": [
            indexed_turn_json(index, detail, tokens=tokens) for index in range(len(detail.turns))
        ],
        "spans": [asdict(span) for span in detail.spans],
    }


def indexed_turn_json(index: int, detail: RolloutDetail, *, tokens: bool) -> dict[str, Any]:
    """A turn with its index in its rollout and the rewards that were given for it."""
    turn = detail.turns[index]
    return {
        "turn": index,
        **turn_json(turn, detail.dispositions.get(turn.turn_id), tokens=tokens),
        "rewards": [asdict(reward) for reward in rewards_of_turn(index, detail)],
    }


def turn_json(turn: Turn, fate: TurnDisposition | None, *, tokens: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "turn_id": turn.turn_id,
        "parent_turn_id": turn.parent_id,
        "fork_reason": turn.fork_reason,
        "dialect": turn.dialect,
        "model": turn.model,
        "prompt_tokens": len(turn.prompt_token_ids),
        "completion_tokens": len(turn.completion_token_ids),
        "policy_versions": turn.policy_versions,
        "sampling": turn.sampling,
        "finish_reason": turn.finish_reason,
        "untrainable": turn.untrainable,
        "parent_span_id": turn.parent_span_id,
        "state_key": turn.state_key,
        "observation": turn.observation,
        "request": turn.request,
        "response": turn.response,
        "created_at": turn.created_at,
        "trained_step": fate.step if fate else None,
        "skip_reason": fate.skip_reason if fate else None,
    }
    if tokens:
        found |= {
            "prompt_token_ids": turn.prompt_token_ids.tolist(),
            "completion_token_ids": turn.completion_token_ids.tolist(),
            "completion_logprobs": turn.completion_logprobs.tolist(),
        }
    return found
