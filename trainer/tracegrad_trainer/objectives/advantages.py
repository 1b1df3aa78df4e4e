"""Advantages: one number a rollout, from the rewards of its group.

A part takes the rewards f64[n] of the whole batch and each rollout's group number i64[n], and
returns advantages f64[n].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .registry import Registry

Rewards = NDArray[np.float64]
GroupNumbers = NDArray[np.int64]
Advantage = Callable[[Rewards, GroupNumbers], Rewards]

ADVANTAGES: Registry[Advantage] = Registry("advantage")

STD_EPSILON = 1e-6


@ADVANTAGES.register("dr_grpo")
def dr_grpo(rewards: Rewards, group: GroupNumbers) -> Rewards:
    """R - mean_g (Dr. GRPO, arXiv 2503.20783): no division by the group's spread."""
    if not len(rewards):
        return rewards
    means = np.bincount(group, weights=rewards) / np.maximum(np.bincount(group), 1)
    return np.asarray(rewards - means[group])


@ADVANTAGES.register("grpo")
def grpo(rewards: Rewards, group: GroupNumbers) -> Rewards:
    """(R - mean_g) / (std_g + 1e-6) (GRPO, arXiv 2402.03300), with the sample deviation (n - 1)."""
    if not len(rewards):
        return rewards
    centred = dr_grpo(rewards, group)
    squares = np.bincount(group, weights=centred**2)
    std = np.sqrt(squares / np.maximum(np.bincount(group) - 1, 1))
    return np.asarray(centred / (std[group] + STD_EPSILON))
