"""Advantages of a rollout's reward within its group: the same for each of its turns."""

from __future__ import annotations

import numpy as np

from tracegrad_trainer.losses.advantages.base import (
    ADVANTAGES,
    AdvantageMemory,
    Numbers,
    PerTurn,
    Rollouts,
)
from tracegrad_trainer.losses.advantages.group_stats import (
    centred,
    groups_of,
    means,
    over_turns,
    rewards_of,
    scaled,
)
from tracegrad_trainer.losses.config import ObjectiveSettings


@ADVANTAGES.register("dr_grpo")
def dr_grpo(rollouts: Rollouts, settings: ObjectiveSettings, memory: AdvantageMemory) -> PerTurn:
    """R - mean_g (Dr. GRPO, arXiv 2503.20783): no division by the group's spread."""
    return over_turns(rollouts, centred(rewards_of(rollouts), groups_of(rollouts)))


@ADVANTAGES.register("grpo")
def grpo(rollouts: Rollouts, settings: ObjectiveSettings, memory: AdvantageMemory) -> PerTurn:
    """(R - mean_g) / (std_g + 1e-6) (GRPO, arXiv 2402.03300), with the sample deviation (n - 1)."""
    return over_turns(rollouts, scaled(rewards_of(rollouts), groups_of(rollouts)))


@ADVANTAGES.register("rloo")
def rloo(rollouts: Rollouts, settings: ObjectiveSettings, memory: AdvantageMemory) -> PerTurn:
    """R - mean of the group's other rollouts (RLOO, arXiv 2402.14740); 0 where there is none."""
    group = groups_of(rollouts)
    sizes = np.bincount(group)[group]
    # R - (n mean - R) / (n - 1) = n / (n - 1) (R - mean)
    return over_turns(
        rollouts, centred(rewards_of(rollouts), group) * sizes / np.maximum(sizes - 1, 1)
    )


@ADVANTAGES.register("reinforce++")
def reinforce_plus_plus(
    rollouts: Rollouts, settings: ObjectiveSettings, memory: AdvantageMemory
) -> PerTurn:
    """R - mean_g; then the trained tokens' to mean 0 and variance 1 (REINFORCE++ with baseline,
    arXiv 2501.03262). That comes later, as by `whiten`: what filters take away has no part in it.
    """
    return over_turns(rollouts, centred(rewards_of(rollouts), groups_of(rollouts)))


@ADVANTAGES.register("opo")
def opo(rollouts: Rollouts, settings: ObjectiveSettings, memory: AdvantageMemory) -> PerTurn:
    """R - sum(l R) / sum(l) over the group, l sampled tokens of a rollout (OPO, arXiv 2505.23585).

    It is the baseline of least variance where a rollout's squared gradient grows with its
    length. A group without any sampled token has its plain mean.
    """
    group, rewards, lengths = groups_of(rollouts), rewards_of(rollouts), _lengths(rollouts)
    total = np.bincount(group, weights=lengths)[group]
    weights = np.where(total > 0, lengths, 1.0)
    return over_turns(rollouts, rewards - means(weights * rewards, group) / means(weights, group))


@ADVANTAGES.register("max_rl")
def max_rl(rollouts: Rollouts, settings: ObjectiveSettings, memory: AdvantageMemory) -> PerTurn:
    """(R - mean_g) / mean_g (MaxRL, arXiv 2602.02710): for rewards 0 and 1 the mean of the
    successes' gradients, less the group's mean gradient; 0 where nothing succeeded.

    Raises:
        ValueError: a reward below 0: the sign of an advantage would hang on the group's mean.
    """
    for rollout in rollouts:
        if rollout.reward < 0:
            raise ValueError(
                f"advantage = 'max_rl' needs rewards of at least 0: rollout {rollout.rollout_id}"
                f" has {rollout.reward:g} (a penalty of over-long rollouts counts too)"
            )
    rewards, group = rewards_of(rollouts), groups_of(rollouts)
    mean = means(rewards, group)
    return over_turns(rollouts, (rewards - mean) / np.where(mean > 0, mean, 1.0))


def _lengths(rollouts: Rollouts) -> Numbers:
    """Sampled tokens of each rollout."""
    return np.array([rollout.tokens.sum() for rollout in rollouts], np.float64)
