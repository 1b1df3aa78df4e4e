"""Built-in terms: functions over a rollout, as users write them, run as theirs are."""

from __future__ import annotations

import re

from tracegrad_trainer.rewards.rollout import ScoredRollout


def length(rollout: ScoredRollout, *, target_tokens: int, over_tokens: int | None = None) -> float:
    """How far the tokens of all replies are over the target: 0 up to it, 1 so many above it."""
    tokens = sum(turn.completion_tokens for turn in rollout.turns)
    return min(1.0, max(0, tokens - target_tokens) / (over_tokens or target_tokens))


def matches_format(rollout: ScoredRollout, *, pattern: str) -> float:
    """1 where the last reply has the pattern, else 0."""
    return float(re.search(pattern, rollout.last_reply) is not None)
