"""Built-in terms: functions over a rollout, as users write them, run as theirs are."""

from __future__ import annotations

import re

from tracegrad_trainer.rewards.config import FormatTerm, LengthTerm
from tracegrad_trainer.rewards.rollout import ScoredRollout


def length(rollout: ScoredRollout, term: LengthTerm) -> float:
    """How far the tokens of all replies are over the target: 0 up to it, 1 so many above it."""
    tokens = sum(turn.completion_tokens for turn in rollout.turns)
    over = term.over_tokens or term.target_tokens
    return min(1.0, max(0, tokens - term.target_tokens) / over)


def matches_format(rollout: ScoredRollout, term: FormatTerm) -> float:
    """1 where the last reply has the pattern, else 0."""
    return float(re.search(term.pattern, rollout.last_reply) is not None)
