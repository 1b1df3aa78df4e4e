"""Advantages that differ from turn to turn of a rollout."""

from __future__ import annotations

import numpy as np

from tracegrad_trainer.losses.advantages.base import (
    ADVANTAGES,
    AdvantageMemory,
    Numbers,
    PerTurn,
    RolloutRewards,
    Rollouts,
    Whole,
)
from tracegrad_trainer.losses.advantages.group_stats import (
    centred,
    groups_of,
    over_turns,
    per_rollout,
    rewards_of,
    scaled,
)
from tracegrad_trainer.losses.config import ObjectiveSettings


def returns(rollout: RolloutRewards, gamma: float) -> Numbers:
    """G_k = r_k + gamma G_{k+1}, f64[K]; of the last turn r_k and the rollout's reward.

    k counts the turns in the order in which the rollout took them, whichever turn's tokens each
    goes on from: a history that was edited or rendered again is no other time. Of calls that ran
    side by side (sub-agents, several choices) the one whose reply came first was taken first.
    """
    found = np.empty(len(rollout.turn_rewards))
    after = rollout.reward
    for k in range(len(found) - 1, -1, -1):
        found[k] = rollout.turn_rewards[k] + after
        after = gamma * found[k]
    return found


@ADVANTAGES.register("turn_return")
def turn_return(
    rollouts: Rollouts, settings: ObjectiveSettings, memory: AdvantageMemory
) -> PerTurn:
    """G_k (see `returns`) less the group's mean at the same turn index.

    A rollout that ended earlier stands there with its last turn's return. So a baseline is
    always that of the whole group, not of those that went on for long; and with gamma = 1 and
    no rewards of turns this is `dr_grpo`.
    """
    found = [returns(rollout, settings.gamma) for rollout in rollouts]
    values = [np.zeros(len(own)) for own in found]
    groups = groups_of(rollouts)
    for number in np.unique(groups):
        members = np.flatnonzero(groups == number)
        longest = max(len(found[i]) for i in members)
        for k in range(longest):
            standing = [_at(found[i], k, rollouts[i].reward) for i in members]
            baseline = float(np.mean(standing))
            for i in members:
                if k < len(values[i]):
                    values[i][k] = found[i][k] - baseline
    return values


@ADVANTAGES.register("gigpo")
def gigpo(rollouts: Rollouts, settings: ObjectiveSettings, memory: AdvantageMemory) -> PerTurn:
    """A(rollout) + turn_weight x A(turn) (GiGPO, arXiv 2505.10978), each (x - mean) / (std + 1e-6).

    A rollout is worth its reward and its turns' together, compared within the group; a turn its
    discounted return, compared among the group's turns of equal environment state, in one rollout
    or in several: nothing where it has no equal, or its state is not known.
    """
    if not rollouts:
        return []
    groups = groups_of(rollouts)
    totals = np.array([r.reward + r.turn_rewards.sum() for r in rollouts])
    whole = over_turns(rollouts, scaled(totals, groups))
    worth = np.concatenate([returns(rollout, settings.gamma) for rollout in rollouts])
    turns = per_rollout(rollouts, scaled(worth, _states(rollouts)))
    return [a + settings.turn_weight * b for a, b in zip(whole, turns, strict=True)]


def _states(rollouts: Rollouts) -> Whole:
    """For each turn the number of its state within its group; an unknown one is like no other."""
    numbers: dict[tuple[int, bytes | int], int] = {}
    found: list[int] = []
    for rollout in rollouts:
        for state in rollout.states:
            key = len(found) if state is None else state
            found.append(numbers.setdefault((rollout.group, key), len(numbers)))
    return np.array(found, np.int64)


@ADVANTAGES.register("ipa")
def ipa(rollouts: Rollouts, settings: ObjectiveSettings, memory: AdvantageMemory) -> PerTurn:
    """G_k = gamma^|j - k| x R, j the deciding turn (IPA, arXiv 2512.24873, equation 7).

    j is `deciding`. With rewards in {0, 1} failures carry no gradient;
    `settings.centre` makes R the reward less the group's mean. An expert's turn has the return
    that it had for the expert, whatever came of it here; 0 where `imitation` is off.
    """
    rewards = rewards_of(rollouts)
    if settings.centre:
        rewards = centred(rewards, groups_of(rollouts))
    return [
        _ipa(rollout, reward, settings)
        for rollout, reward in zip(rollouts, rewards.tolist(), strict=True)
    ]


def _ipa(rollout: RolloutRewards, reward: float, settings: ObjectiveSettings) -> Numbers:
    turns = len(rollout.tokens)
    values = reward * settings.gamma ** np.abs(np.arange(turns) - deciding(rollout, settings))
    for k, shown in rollout.demonstrations.items():
        values[k] = shown.reward * settings.gamma**shown.distance if settings.imitation else 0.0
    return np.asarray(values, np.float64)


def deciding(rollout: RolloutRewards, settings: ObjectiveSettings) -> int:
    """The turn that decided the outcome: the marked one, the last one with a reward of its own
    above 0, or the last one (`settings.deciding_turn`; the last one too where none of those is)."""
    last = len(rollout.tokens) - 1
    if settings.deciding_turn == "marked" and rollout.deciding_turn is not None:
        return rollout.deciding_turn
    if settings.deciding_turn == "rewarded":
        return int(max(np.flatnonzero(rollout.turn_rewards > 0), default=last))
    return last


@ADVANTAGES.register("gae")
def gae(rollouts: Rollouts, settings: ObjectiveSettings, memory: AdvantageMemory) -> PerTurn:
    """Zeros: these hang on values, and are known after a forward (`losses/gae.py`)."""
    return over_turns(rollouts, np.zeros(len(rollouts)))


def _at(returns: Numbers, index: int, reward: float) -> float:
    return float(returns[min(index, len(returns) - 1)]) if len(returns) else reward
