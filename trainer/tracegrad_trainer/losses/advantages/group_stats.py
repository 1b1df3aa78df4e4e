"""Arithmetic of groups: numbers less their group's mean, over their group's deviation.

A group of one has no spread and nothing to be compared with: its centred number is 0.
"""

from __future__ import annotations

import numpy as np

from tracegrad_trainer.losses.advantages.base import Numbers, PerTurn, Rollouts, Whole

STD_EPSILON = 1e-6


def groups_of(rollouts: Rollouts) -> Whole:
    return np.array([rollout.group for rollout in rollouts], np.int64)


def rewards_of(rollouts: Rollouts) -> Numbers:
    return np.array([rollout.reward for rollout in rollouts], np.float64)


def over_turns(rollouts: Rollouts, values: Numbers) -> PerTurn:
    """One number a rollout, the same for each of its turns."""
    return [np.full(len(r.tokens), value) for r, value in zip(rollouts, values, strict=True)]


def per_rollout(rollouts: Rollouts, values: Numbers) -> PerTurn:
    """Numbers of all turns, one rollout's behind the other's, as one array a rollout."""
    ends = np.cumsum([len(rollout.tokens) for rollout in rollouts], dtype=np.int64)
    return np.split(values, ends[:-1]) if len(rollouts) else []


def means(values: Numbers, group: Whole) -> Numbers:
    """For each number the mean of its group."""
    sums = np.bincount(group, weights=values)
    return np.asarray((sums / np.maximum(np.bincount(group), 1))[group])


def centred(values: Numbers, group: Whole) -> Numbers:
    return values - means(values, group)


def scaled(values: Numbers, group: Whole) -> Numbers:
    """(x - mean) / (std + 1e-6) within each group, with the sample deviation (n - 1)."""
    less = centred(values, group)
    squares = np.bincount(group, weights=less**2)
    std = np.sqrt(squares / np.maximum(np.bincount(group) - 1, 1))
    return np.asarray(less / (std[group] + STD_EPSILON))
