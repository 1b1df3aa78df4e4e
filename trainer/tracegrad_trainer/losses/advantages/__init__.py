"""Advantages: one number a turn, from the rewards of the groups of a batch.

A part takes all scored rollouts of a batch, the settings and a memory that lasts from step to
step, and returns for each rollout f64[K], one entry for each of its turns.
"""

from tracegrad_trainer.losses.advantages import group_relative, per_turn, running_mean
from tracegrad_trainer.losses.advantages.base import (
    ADVANTAGES,
    AdvantageMemory,
    DemonstrationOutcome,
    RolloutRewards,
)

__all__ = [
    "ADVANTAGES",
    "AdvantageMemory",
    "DemonstrationOutcome",
    "RolloutRewards",
    "group_relative",
    "per_turn",
    "running_mean",
]
