"""A judge's rewards: asked for once a group, kept in the store, used instead of those it had."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from tracegrad.events import Reward
from tracegrad.store import Group, Store
from tracegrad.store.types import JUDGE_SOURCE
from tracegrad_trainer.losses.judge import judge_rewards, load_judge


class RewardJudge:
    """`path` is the judge's import path.

    Raises:
        ValueError: there is no such judge; it did not give a number for each rollout.
    """

    def __init__(self, path: str, store: Store) -> None:
        self.path = path
        self.judge = load_judge(path)
        self.store = store

    def apply(self, groups: Sequence[Group]) -> list[Group]:
        return [self._judged(group) for group in groups]

    def _judged(self, group: Group) -> Group:
        ids = [self._reward_id(group, rollout.rollout_id) for rollout in group.rollouts]
        # A trainer that was killed may have asked for this very group already.
        rewards = self._known(group, ids)
        if rewards is None:
            rewards = judge_rewards(self.judge, group)
            self.store.append(
                [
                    Reward(
                        reward_id=reward_id,
                        rollout_id=rollout.rollout_id,
                        value=value,
                        source=JUDGE_SOURCE,
                        label=self.path,
                    )
                    for reward_id, rollout, value in zip(ids, group.rollouts, rewards, strict=True)
                ]
            )
        rollouts = [
            replace(rollout, reward=value)
            for rollout, value in zip(group.rollouts, rewards, strict=True)
        ]
        return replace(group, rollouts=rollouts)

    def _known(self, group: Group, ids: Sequence[str]) -> list[float] | None:
        rewards = []
        for reward_id, rollout in zip(ids, group.rollouts, strict=True):
            events = self.store.rewards(rollout.rollout_id)
            mine = (event for event in events if event.source == JUDGE_SOURCE)
            same = (event.value for event in mine if event.reward_id == reward_id)
            found = [value for value in same if value is not None]
            if not found:
                return None
            rewards += found
        return rewards

    def _reward_id(self, group: Group, rollout_id: str) -> str:
        """The same for the same rollouts in the same company, and for nothing else."""
        company = "\n".join([self.path, *sorted(r.rollout_id for r in group.rollouts), rollout_id])
        return hashlib.sha256(company.encode()).hexdigest()[:32]
