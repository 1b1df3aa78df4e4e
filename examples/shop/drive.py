"""Sends the shop's agent to work."""

from __future__ import annotations

from functools import partial

from . import agent, rollouts
from .rollouts import Group, Score

__all__ = ["Group", "Score", "attempt", "evaluate", "train"]

attempt = rollouts.attempts_of("shop", agent.answer)
train = partial(rollouts.train, attempt)
evaluate = partial(rollouts.evaluate, attempt)
