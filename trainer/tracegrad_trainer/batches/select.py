"""Which turns may be trained, and why the others are not. Every turn gets one answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tracegrad.records import Turn
from tracegrad_trainer.objectives.advantages import Scored

from .rows import RolloutLike, Row, rows_of, temperature_of
from .settings import BatchSettings

# All scored rollouts of a batch -> for each f64[K], one entry a turn
AdvantageFunction = Callable[[Sequence[Scored]], Sequence[NDArray[np.float64]]]


class GroupLike(Protocol):
    """Rollouts compared with each other; the store's `Group` has this."""

    @property
    def group_id(self) -> str: ...
    @property
    def rollouts(self) -> Sequence[RolloutLike]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rows to train on; `trained` and `skipped` (id -> reason) together hold every turn."""

    rows: list[Row]
    trained: list[str]
    skipped: dict[str, str]
    rollouts: list[str]
    stats: dict[str, float]

    def without_rows(self, indices: Collection[int], reason: str) -> Selection:
        """The selection after rows left the step (their numbers were not finite)."""
        lost = {turn_id: reason for i in indices for turn_id in self.rows[i].kept_turn_ids}
        return replace(
            self,
            rows=[row for i, row in enumerate(self.rows) if i not in set(indices)],
            trained=[turn_id for turn_id in self.trained if turn_id not in lost],
            skipped=self.skipped | lost,
        )


def select(
    groups: Sequence[GroupLike],
    settings: BatchSettings,
    *,
    advantages: AdvantageFunction,
    current_version: int,
    failed_versions: Collection[int] = (),
) -> Selection:
    """Filter turns and build the rows of a batch.

    Advantages come from all rollouts of a group, whatever the filters take away afterwards:
    a filter must not move the baseline.

    Raises:
        ValueError: a reward is not a finite number.
    """
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    numbers = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
    rewards = np.array([rollout.reward for _, rollout in rollouts], np.float64)
    for index in np.flatnonzero(~np.isfinite(rewards)):
        name = rollouts[index][1].rollout_id
        raise ValueError(f"reward of rollout {name} is {rewards[index]}: it must be finite")
    advantage = advantages(
        [
            scored(rollout, group=int(number), task=group.group_id)
            for (group, rollout), number in zip(rollouts, numbers, strict=True)
        ]
    )
    assert [len(values) for values in advantage] == [len(r.turns) for _, r in rollouts]
    equal = [bool(np.ptp(rewards[numbers == g]) == 0) for g in range(len(groups))]

    rows: list[Row] = []
    trained: list[str] = []
    skipped: dict[str, str] = {}
    for (group, rollout), number, value in zip(rollouts, numbers, advantage, strict=True):
        reasons: dict[str, str] = {}
        for turn in rollout.turns:
            reason = turn_reason(turn, settings, current_version, failed_versions)
            if reason is None and settings.drop_equal_reward and equal[number]:
                reason = "equal_reward"
            if reason is not None:
                reasons[turn.turn_id] = reason
        skipped |= reasons
        new = rows_of(rollout, group_id=group.group_id, advantages=value, skipped=reasons)
        rows += new
        trained += [turn_id for row in new for turn_id in row.kept_turn_ids]
    assert len(trained) == len(set(trained))
    assert set(trained) | set(skipped) == {t.turn_id for _, r in rollouts for t in r.turns}
    assert not set(trained) & set(skipped)
    return Selection(
        rows=rows,
        trained=trained,
        skipped=skipped,
        rollouts=[rollout.rollout_id for _, rollout in rollouts],
        stats=_stats(rewards, advantage, equal),
    )


def scored(rollout: RolloutLike, *, group: int, task: str) -> Scored:
    numbers = {turn.turn_id: i for i, turn in enumerate(rollout.turns)}
    given = getattr(rollout, "turn_rewards", {})
    return Scored(
        rollout_id=rollout.rollout_id,
        task=task,
        agent=getattr(rollout, "agent", None) or "",
        group=group,
        reward=rollout.reward,
        turn_rewards=np.array([given.get(i, 0.0) for i in range(len(numbers))], np.float64),
        tokens=np.array([len(turn.completion_token_ids) for turn in rollout.turns], np.int64),
        parents=np.array([numbers.get(t.parent_id or "", -1) for t in rollout.turns], np.int64),
        states=[
            hashlib.blake2b(turn.prompt_token_ids, digest_size=16).digest()
            for turn in rollout.turns
        ],
    )


def turn_reason(
    turn: Turn,
    settings: BatchSettings,
    current_version: int,
    failed_versions: Collection[int] = (),
) -> str | None:
    """Why this turn must not be trained, or None. The first reason that holds is the answer."""
    if turn.untrainable is not None:
        return turn.untrainable
    if not turn.completion_token_ids:
        return "no_tokens"
    if not turn.prompt_token_ids:
        return "no_prompt"
    if temperature_of(turn) <= 0:
        return "greedy"
    if not np.isfinite(np.frombuffer(turn.completion_logprobs, np.float32)).all():
        return "non_finite"
    versions = [version for version, _ in turn.policy_versions]
    if any(version in failed_versions for version in versions):
        return "failed_push"
    if (
        settings.max_staleness is not None
        and current_version - min(versions) > settings.max_staleness
    ):
        return "stale"
    if len(turn.prompt_token_ids) + len(turn.completion_token_ids) > settings.row_limit:
        return "over_long"
    return None


def _stats(
    rewards: NDArray[np.float64], advantage: Sequence[NDArray[np.float64]], equal: Sequence[bool]
) -> dict[str, float]:
    some = len(rewards) > 0
    return {
        "groups": float(len(equal)),
        "groups_equal_reward": float(sum(equal)),
        "rollouts": float(len(rewards)),
        "reward_mean": float(rewards.mean()) if some else 0.0,
        "reward_std": float(rewards.std()) if some else 0.0,
        "advantage_abs_mean": float(np.abs(np.concatenate(advantage)).mean()) if some else 0.0,
    }
