"""Advantages that differ from turn to turn of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .groups import centred, groups_of, over_turns, per_rollout, rewards_of, scaled
from .scored import ADVANTAGES, Memory, Numbers, Scored, Whole

if TYPE_CHECKING:
    from ..settings import ObjectiveSettings


def tree_returns(parents: Whole, given: Numbers, reward: float, gamma: float) -> Numbers:
    """G_k = r_k + gamma x G of what follows, [K]; a path's last turn: r_k + reward.

    Where a path forks, what follows is the *mean* over the branches: they are parts of one
    attempt with one outcome, and a turn is not worth twice as much because its history was
    edited or a sub-agent was called. So the value of a turn is the mean over the paths below it,
    as in tree search (TreeRL, arXiv 2506.11902), and G stays within the range of the rewards.
    """
    turns = len(parents)
    assert (parents < np.arange(turns)).all(), "a turn continues one that was captured before"
    total, branches = np.zeros(turns), np.zeros(turns, np.int64)
    returns = np.empty(turns)
    for k in range(turns - 1, -1, -1):
        after = gamma * total[k] / branches[k] if branches[k] else reward
        returns[k] = given[k] + after
        if parents[k] >= 0:
            total[parents[k]] += returns[k]
            branches[parents[k]] += 1
    return returns


@ADVANTAGES.register("turn_return")
def turn_return(
    rollouts: Sequence[Scored], settings: ObjectiveSettings, memory: Memory
) -> list[Numbers]:
    """G_k (see `tree_returns`; rewards of turns, and the rollout's at the ends of its paths) less
    the group's mean at the same turn index.

    A rollout that ended earlier stands there with its last turn's return. So a baseline is
    always that of the whole group, not of those that went on for long; and with gamma = 1 and
    no rewards of turns this is `dr_grpo`.
    """
    returns = _returns(rollouts, settings.gamma)
    values = [np.zeros(len(own)) for own in returns]
    groups = groups_of(rollouts)
    for number in np.unique(groups):
        members = np.flatnonzero(groups == number)
        longest = max(len(returns[i]) for i in members)
        for k in range(longest):
            standing = [_at(returns[i], k, rollouts[i].reward) for i in members]
            baseline = float(np.mean(standing))
            for i in members:
                if k < len(values[i]):
                    values[i][k] = returns[i][k] - baseline
    return values


@ADVANTAGES.register("gigpo")
def gigpo(rollouts: Sequence[Scored], settings: ObjectiveSettings, memory: Memory) -> list[Numbers]:
    """A(rollout) + turn_weight x A(turn) (GiGPO, arXiv 2505.10978), each (x - mean) / (std + 1e-6).

    A rollout is worth its reward and its turns' together, compared within the group; a turn its
    discounted return, compared among the group's turns of equal state: nothing where it has no
    equal.
    """
    if not rollouts:
        return []
    groups = groups_of(rollouts)
    totals = np.array([r.reward + r.turn_rewards.sum() for r in rollouts])
    whole = over_turns(rollouts, scaled(totals, groups))
    numbers: dict[tuple[int, bytes], int] = {}
    state = np.array(
        [
            numbers.setdefault((rollout.group, of_turn), len(numbers))
            for rollout in rollouts
            for of_turn in rollout.states
        ],
        np.int64,
    )
    returns = np.concatenate(_returns(rollouts, settings.gamma))
    turns = per_rollout(rollouts, scaled(returns, state))
    return [a + settings.turn_weight * b for a, b in zip(whole, turns, strict=True)]


@ADVANTAGES.register("ipa")
def ipa(rollouts: Sequence[Scored], settings: ObjectiveSettings, memory: Memory) -> list[Numbers]:
    """G_k = gamma^(turns to the last one of the path) x R (IPA, arXiv 2512.24873).

    Where paths fork, the mean over them, as in `tree_returns`. With rewards in {0, 1} failures
    carry no gradient; `settings.centre` makes R the reward less the group's mean.
    """
    rewards = rewards_of(rollouts)
    if settings.centre:
        rewards = centred(rewards, groups_of(rollouts))
    return [
        tree_returns(rollout.parents, np.zeros(len(rollout.parents)), reward, settings.gamma)
        for rollout, reward in zip(rollouts, rewards.tolist(), strict=True)
    ]


@ADVANTAGES.register("gae")
def gae(rollouts: Sequence[Scored], settings: ObjectiveSettings, memory: Memory) -> list[Numbers]:
    """Zeros: these hang on values, and are known after a forward (`objectives/gae.py`)."""
    return over_turns(rollouts, np.zeros(len(rollouts)))


def _returns(rollouts: Sequence[Scored], gamma: float) -> list[Numbers]:
    return [tree_returns(r.parents, r.turn_rewards, r.reward, gamma) for r in rollouts]


def _at(returns: Numbers, index: int, reward: float) -> float:
    return float(returns[min(index, len(returns) - 1)]) if len(returns) else reward
