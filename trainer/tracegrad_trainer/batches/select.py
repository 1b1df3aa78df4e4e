"""Which turns may be trained, and why the others are not. Every turn gets one answer.

The same groups, settings and memory of the advantages give the same selection: nothing here
asks the clock, draws a number or depends on the order of a set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tracegrad.events import Turn
from tracegrad.turn_scopes import TurnScope
from tracegrad.turn_tree import TurnTree
from tracegrad_trainer.batches.config import BatchSettings
from tracegrad_trainer.batches.expert_routing import RoutingLayout
from tracegrad_trainer.batches.filters import length_reason, reasons_of, staleness_weights
from tracegrad_trainer.batches.rows import Row, RowSource, path_rows
from tracegrad_trainer.batches.stats import (
    advantage_stats,
    path_stats,
    reward_stats,
    routing_stats,
    row_stats,
    stale_stats,
    state_stats,
    turn_stats,
)
from tracegrad_trainer.batches.tree_rows import tree_rows
from tracegrad_trainer.batches.turn_access import (
    RolloutLike,
    demonstration_outcomes,
    is_demonstration,
    state_before,
    turn_rewards,
)
from tracegrad_trainer.batches.version_scale import (
    RolledBackVersions,
    SkippedVersions,
    VersionScale,
)
from tracegrad_trainer.losses.advantages import RolloutRewards

# An advantage this small is nothing but the rounding of a mean.
_ROUNDING = 1e-9

# All scored rollouts of a batch -> for each f64[K], one entry a turn
AdvantageFunction = Callable[[Sequence[RolloutRewards]], Sequence[NDArray[np.float64]]]


class GroupLike(Protocol):
    """Rollouts compared with each other; the store's `Group` has this."""

    @property
    def group_id(self) -> str: ...
    @property
    def rollouts(self) -> Sequence[RolloutLike]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSelection:
    """Rows to train on; `trained` and `skipped` (id -> reason) together hold every turn.
    `advantages` has what each turn was credited with, by id, where turns are compared."""

    rows: list[Row]
    trained: list[str]
    skipped: dict[str, str]
    rollouts: list[str]
    stats: dict[str, float]
    advantages: dict[str, float] = field(default_factory=dict)

    def without_rows(self, indices: Collection[int], reason: str) -> TrainingSelection:
        """The selection after rows left the step (their numbers were not finite), each with the
        rows that it is paired with."""
        broken = {self.rows[i].pair for i in indices} - {-1}
        gone = set(indices) | {i for i, row in enumerate(self.rows) if row.pair in broken}
        rows = [row for i, row in enumerate(self.rows) if i not in gone]
        # A turn may be in several pairs.
        left = {turn_id for row in rows for turn_id in row.kept_turn_ids}
        lost = {t: reason for i in sorted(gone) for t in self.rows[i].kept_turn_ids}
        lost = {turn_id: reason for turn_id in lost if turn_id not in left}
        return replace(
            self,
            rows=rows,
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
    skipped_versions: SkippedVersions = (),
    rolled_back_versions: RolledBackVersions = (),
    vocabulary: int | None = None,
    routing: RoutingLayout | None = None,
    scopes: Mapping[str, TurnScope] = {},
) -> TrainingSelection:
    """Filter turns and build the rows of a batch.

    Advantages come from all rollouts of a group, whatever the filters take away afterwards:
    a filter must not move the baseline. `vocabulary`: how many tokens the model knows. `routing`:
    the layout of its mixture's experts, where rows have the serving engine's choices (r3).
    `scopes`: of each turn, by id, which agent made it and in which spans (`settings.needs_scopes`).

    Raises:
        ValueError: a turn is in the batch twice; a reward is not a finite number; the user's
            predicate failed; a turn's expert routing is another model's.
    """
    _refuse_twice(groups)
    versions = VersionScale(current_version, skipped_versions, rolled_back_versions)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    numbers = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
    rewards = _rewards(rollouts)
    trees = [TurnTree.of(rollout.turns) for rollout in rollouts]
    scored = [
        rollout_rewards_of(rollout, tree, group=int(number), task=groups[number].group_id)
        for rollout, tree, number in zip(rollouts, trees, numbers, strict=True)
    ]
    advantage = advantages(scored)
    assert [len(values) for values in advantage] == [len(tree.turns) for tree in trees]
    each = [np.flatnonzero(numbers == g) for g in range(len(groups))]
    equal = [_equal([scored[i] for i in where], [advantage[i] for i in where]) for where in each]

    sources: list[RowSource] = []
    credited: dict[str, float] = {}
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    too_long = 0
    for rollout, tree, given, value in zip(rollouts, trees, scored, advantage, strict=True):
        reasons = reasons_of(
            rollout,
            tree,
            settings,
            equal_reward=equal[given.group],
            too_long=length_reason(given, settings, value),
            # Demonstrated turns that the policy is drawn towards.
            imitated={tree.turns[i].turn_id for i in given.demonstrations if value[i] > _ROUNDING},
            versions=versions,
            failed_versions=failed_versions,
            vocabulary=vocabulary,
            scopes=scopes,
        )
        skipped |= reasons
        if settings.stale == "weight":
            value = value * staleness_weights(rollout, settings, versions)
        credited |= zip((turn.turn_id for turn in tree.turns), value.tolist(), strict=True)
        source = RowSource(rollout, tree, given.task, value, reasons, routing)
        new, not_shared = _rows(source, settings)
        sources.append(source)
        rows += versions.placed(new)
        too_long += not_shared
    trained = [turn_id for row in rows for turn_id in row.kept_turn_ids]
    learnt = {
        one.group for one, source in zip(scored, sources, strict=True) if source.trained.turns
    }
    turns = [turn for tree in trees for turn in tree.turns]
    assert sorted([*trained, *skipped]) == sorted(turn.turn_id for turn in turns), (
        "each turn has one answer"
    )
    return TrainingSelection(
        rows=rows,
        trained=trained,
        skipped=skipped,
        rollouts=[rollout.rollout_id for rollout in rollouts],
        stats={
            **reward_stats(rewards, numbers, equal),
            "groups_trained": float(len(learnt)),
            **advantage_stats(advantage),
            **turn_stats(len(turns), skipped),
            **stale_stats(turns, skipped, versions),
            **state_stats(turns),
            **row_stats(rows),
            **({} if routing is None else routing_stats(rows)),
            **path_stats(
                [source.trained for source in sources],
                tokens=sum(map(len, rows)),
                too_long=too_long,
            ),
        },
        advantages=credited,
    )


def _refuse_twice(groups: Sequence[GroupLike]) -> None:
    """A turn that is trained twice by one step weighs double, and moves its group's baseline."""
    seen: dict[str, str] = {}
    for group in groups:
        for rollout in group.rollouts:
            for turn in rollout.turns:
                if turn.turn_id in seen:
                    raise ValueError(
                        f"turn {turn.turn_id} of rollout {rollout.rollout_id} is in the batch"
                        f" twice (groups {seen[turn.turn_id]} and {group.group_id}): give each"
                        " rollout to one group"
                    )
                seen[turn.turn_id] = group.group_id


def rollout_rewards_of(
    rollout: RolloutLike, tree: TurnTree[Turn], *, group: int, task: str
) -> RolloutRewards:
    given = turn_rewards(rollout)
    return RolloutRewards(
        rollout_id=rollout.rollout_id,
        task=task,
        agent=getattr(rollout, "agent", None) or "",
        group=group,
        reward=rollout.reward,
        turn_rewards=np.array([given.get(i, 0.0) for i in range(len(tree.turns))], np.float64),
        tokens=np.array([_sampled(turn) for turn in tree.turns], np.int64),
        parents=np.array(tree.parents, np.int64),
        states=[state_before(turn) for turn in tree.turns],
        deciding_turn=getattr(rollout, "deciding_turn", None),
        demonstrations=demonstration_outcomes(tree.turns),
    )


def _sampled(turn: Turn) -> int:
    return 0 if is_demonstration(turn) else len(turn.completion_token_ids)


def _rows(source: RowSource, settings: BatchSettings) -> tuple[list[Row], int]:
    """Rows of a rollout, and how many of its trees were too long to be one."""
    if settings.shared_prefix == "tree":
        return tree_rows(source, limit=settings.row_limit)
    return path_rows(source), 0


def _equal(rollouts: Sequence[RolloutRewards], advantage: Sequence[NDArray[np.float64]]) -> bool:
    """Whether there is nothing to learn from comparing these rollouts.

    Equal rollouts may differ in rewards of turns, where the advantages look at those.
    """
    if len(rollouts) < 2 or len({rollout.reward for rollout in rollouts}) > 1:
        return False
    by_turn = {reward for rollout in rollouts for reward in rollout.turn_rewards.tolist()}
    return len(by_turn) <= 1 or not any((np.abs(a) > _ROUNDING).any() for a in advantage)


def _rewards(rollouts: Sequence[RolloutLike]) -> NDArray[np.float64]:
    rewards = np.array([rollout.reward for rollout in rollouts], np.float64)
    for index in np.flatnonzero(~np.isfinite(rewards)):
        name = rollouts[index].rollout_id
        raise ValueError(f"reward of rollout {name} is {rewards[index]}: it must be finite")
    for rollout in rollouts:
        for index, reward in turn_rewards(rollout).items():
            if not np.isfinite(reward):
                raise ValueError(
                    f"reward of turn {index} of rollout {rollout.rollout_id} is {reward}:"
                    " it must be finite"
                )
    return rewards
