"""What a step was made of, as its record in the ledger keeps it: enough to run it again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.metadata import version as version_of
from typing import Any

from pydantic import BaseModel, ConfigDict

from tracegrad.events import Json
from tracegrad.store import Group


class RolloutInputs(BaseModel):
    """A rollout as the batch saw it: rewards may be revised later, turns may come late."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollout_id: str
    reward: float
    turn_rewards: dict[int, float]  # index of the turn -> value
    turns: int  # the first so many, in order of capture


class GroupInputs(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    group_id: str
    rollouts: list[RolloutInputs]


class StepInputs(BaseModel):
    """`StepRecord.batch`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    groups: list[GroupInputs]
    version: int  # the policy version that was current before the step
    failed_versions: list[int]
    ranks: int
    threads: int  # of each rank, on a CPU
    memory_before: dict[str, Any]  # what advantages remembered of earlier steps
    dropped_rows: list[int]  # rows that were not finite, as numbers among the batch's
    weights: int | None = None  # whose step's checkpoint it began with; 0: the model folder's
    torch: str | None = None  # version: another one may round otherwise

    def stored(self) -> Json:
        found: Json = self.model_dump(mode="json")
        return found


def step_inputs_of(
    groups: Sequence[Group],
    *,
    version: int,
    failed_versions: Collection[int],
    ranks: int,
    threads: int,
    memory_before: dict[str, Any],
    dropped_rows: Collection[int],
    weights: int | None = None,
) -> StepInputs:
    names = [rollout.rollout_id for group in groups for rollout in group.rollouts]
    assert len(names) == len(set(names)), "a rollout is in a batch once"
    return StepInputs(
        groups=[_group(group) for group in groups],
        version=version,
        failed_versions=sorted(failed_versions),
        ranks=ranks,
        threads=threads,
        memory_before=memory_before,
        dropped_rows=sorted(dropped_rows),
        weights=weights,
        torch=version_of("torch"),
    )


def _group(group: Group) -> GroupInputs:
    rollouts = [
        RolloutInputs(
            rollout_id=rollout.rollout_id,
            reward=rollout.reward,
            turn_rewards=rollout.turn_rewards,
            turns=len(rollout.turns),
        )
        for rollout in group.rollouts
    ]
    return GroupInputs(group_id=group.group_id, rollouts=rollouts)
