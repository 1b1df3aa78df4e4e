"""Rewards from a user's own judge that compares the rollouts of a group with each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tracegrad.events import REWARD_RANGE, is_reward
from tracegrad.import_path import import_part


class JudgedGroup(Protocol):
    """A group as the judge gets it: the store's `Group`, with all its rollouts and their turns."""

    @property
    def group_id(self) -> str: ...
    @property
    def rollouts(self) -> Sequence[Any]: ...


Judge = Callable[[Any], Sequence[float]]


def load_judge(path: str) -> Judge:
    """`package.module:function` -> the function.

    Raises:
        ValueError: there is no such function.
    """
    return import_part("judge", path)


def judge_rewards(judge: Judge, group: JudgedGroup) -> list[float]:
    """One reward for each of the group's rollouts, instead of those they came with.

    Raises:
        ValueError: not one number within bounds (`events.MAX_REWARD`) for each rollout.
    """
    given = judge(group)
    wanted = len(group.rollouts)
    try:
        rewards = [float(value) for value in given]
    except (TypeError, ValueError) as error:
        raise ValueError(f"judge of group {group.group_id}: not numbers ({error})") from error
    if len(rewards) != wanted:
        raise ValueError(
            f"judge of group {group.group_id}: {len(rewards)} rewards for {wanted} rollouts"
        )
    for rollout, reward in zip(group.rollouts, rewards, strict=True):
        if not is_reward(reward):
            raise ValueError(
                f"judge of group {group.group_id}: the reward of rollout {rollout.rollout_id}"
                f" is {reward}; give {REWARD_RANGE}"
            )
    return rewards
