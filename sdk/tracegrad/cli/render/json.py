"""Rollouts as JSON objects. Scripts depend on these names."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tracegrad.events import Reward
from tracegrad.inspect.turn_standing import RewardStandings
from tracegrad.store import RolloutDetail, RolloutSummary
from tracegrad.store.read.task_titles import input_text


def summary_json(row: RolloutSummary, asked: str | None) -> dict[str, Any]:
    """`asked`: the beginning of its input."""
    return {**asdict(row), "asked": asked}


def detail_json(detail: RolloutDetail, *, tokens: bool) -> dict[str, Any]:
    """Token ids and log-probabilities only with `tokens`: they are most of the bytes."""
    standings = RewardStandings(detail)
    return {
        **summary_json(detail.summary, input_text(detail.task)),
        "task": detail.task,
        "rewards": [_reward_json(reward, detail) for reward in detail.rewards],
        "turns": [
            indexed_turn_json(index, detail, standings, tokens=tokens)
            for index in range(len(detail.turns))
        ],
        "spans": [asdict(span) for span in detail.spans],
    }


def indexed_turn_json(
    index: int, detail: RolloutDetail, standings: RewardStandings, *, tokens: bool
) -> dict[str, Any]:
    """A turn with its index in its rollout and the rewards that were given for it."""
    turn = detail.turns[index]
    disposition = detail.dispositions.get(turn.turn_id)
    found: dict[str, Any] = {
        "turn": index,
        "turn_id": turn.turn_id,
        "parent_turn_id": turn.parent_id,
        "fork_reason": turn.fork_reason,
        "dialect": turn.dialect,
        "model": turn.model,
        "prompt_tokens": len(turn.prompt_token_ids),
        "completion_tokens": len(turn.completion_token_ids),
        **{name: getattr(turn, name) for name in _TURN_FIELDS},
        "trained_step": disposition.step if disposition else None,
        "skip_reason": disposition.skip_reason if disposition else None,
        "advantage": disposition.advantage if disposition else None,
    }
    if tokens:
        found |= {name: getattr(turn, name).tolist() for name in _TOKEN_FIELDS}
    return found | {
        "rewards": [_reward_json(reward, detail) for reward in standings.of_turn(index)]
    }


def _reward_json(reward: Reward, detail: RolloutDetail) -> dict[str, Any]:
    return {**asdict(reward), "after_training": detail.came_late(reward)}


_TURN_FIELDS = (
    *("policy_versions", "sampling", "finish_reason", "untrainable", "parent_span_id"),
    *("state_key", "observation", "request", "response", "timing", "created_at"),
    *("agent_name", "asked_model"),
)
_TOKEN_FIELDS = ("prompt_token_ids", "completion_token_ids", "completion_logprobs")
