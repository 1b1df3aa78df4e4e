"""Advantages: one number a turn, from the rewards of the groups of a batch.

A part takes all scored rollouts of a batch, the settings and a memory that lasts from step to
step, and returns for each rollout f64[K], one entry for each of its turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .registry import Registry

if TYPE_CHECKING:
    from .settings import ObjectiveSettings

Numbers = NDArray[np.float64]
# JSON-able; kept in checkpoints, so that a run that goes on remembers.
Memory = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scored:
    """A rollout with K turns, in order of capture."""

    rollout_id: str
    task: str
    agent: str
    group: int  # 0, 1, ... in the batch
    reward: float  # of the rollout
    turn_rewards: Numbers  # [K] given to the turn; 0 where nothing was
    tokens: NDArray[np.int64]  # [K] sampled ones
    parents: NDArray[np.int64]  # [K] the turn that it continues; -1: none
    states: Sequence[bytes]  # [K] equal prompts have equal ones


Advantage = Callable[[Sequence[Scored], "ObjectiveSettings", Memory], list[Numbers]]

ADVANTAGES: Registry[Advantage] = Registry("advantage")

STD_EPSILON = 1e-6


@ADVANTAGES.register("dr_grpo")
def dr_grpo(
    rollouts: Sequence[Scored], settings: ObjectiveSettings, memory: Memory
) -> list[Numbers]:
    """R - mean_g (Dr. GRPO, arXiv 2503.20783): no division by the group's spread."""
    return over_turns(rollouts, _centred(rollouts))


@ADVANTAGES.register("grpo")
def grpo(rollouts: Sequence[Scored], settings: ObjectiveSettings, memory: Memory) -> list[Numbers]:
    """(R - mean_g) / (std_g + 1e-6) (GRPO, arXiv 2402.03300), with the sample deviation (n - 1)."""
    centred, group = _centred(rollouts), groups_of(rollouts)
    squares = np.bincount(group, weights=centred**2)
    std = np.sqrt(squares / np.maximum(np.bincount(group) - 1, 1))
    return over_turns(rollouts, centred / (std[group] + STD_EPSILON))


def over_turns(rollouts: Sequence[Scored], values: Numbers) -> list[Numbers]:
    """One number a rollout, the same for each of its turns."""
    return [np.full(len(r.tokens), value) for r, value in zip(rollouts, values, strict=True)]


def groups_of(rollouts: Sequence[Scored]) -> NDArray[np.int64]:
    return np.array([rollout.group for rollout in rollouts], np.int64)


def rewards_of(rollouts: Sequence[Scored]) -> Numbers:
    return np.array([rollout.reward for rollout in rollouts], np.float64)


def _centred(rollouts: Sequence[Scored]) -> Numbers:
    rewards, group = rewards_of(rollouts), groups_of(rollouts)
    means = np.bincount(group, weights=rewards) / np.maximum(np.bincount(group), 1)
    return np.asarray(rewards - means[group])
