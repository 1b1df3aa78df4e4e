"""Advantages: one number a turn, from the rewards of the groups of a batch.

A part takes all scored rollouts of a batch, the settings and a memory that lasts from step to
step, and returns for each rollout f64[K], one entry for each of its turns.
"""

from tracegrad_trainer.losses.advantages import group_relative, per_turn, running_mean
from tracegrad_trainer.losses.advantages.base import (
    ADVANTAGES,
    Advantage,
    AdvantageMemory,
    DemonstrationOutcome,
    Numbers,
    RolloutRewards,
)

# They compare a group's rollouts: 0 for one that is alone, and for all of equal rewards.
GROUP_RELATIVE = frozenset(
    {"grpo", "dr_grpo", "rloo", "reinforce++", "opo", "max_rl", "turn_return", "gigpo"}
)

__all__ = [
    "ADVANTAGES",
    "GROUP_RELATIVE",
    "Advantage",
    "AdvantageMemory",
    "DemonstrationOutcome",
    "Numbers",
    "RolloutRewards",
    "group_relative",
    "per_turn",
    "running_mean",
]
