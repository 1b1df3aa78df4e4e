"""What a step was made of, as its record in the ledger keeps it: enough to run it again."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version as version_of
from typing import Any

from pydantic import BaseModel, ConfigDict

from tracegrad.store import Group
from tracegrad_trainer.batches import PackingRule
from tracegrad_trainer.batches.packing import ATTENTION_PARITY
from tracegrad_trainer.engine.config import ADAMW, AdamwImplementation


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
    skipped_versions: list[tuple[int, int]] = []  # as in `VersionScale`
    rolled_back_versions: list[tuple[int, int]] = []  # likewise
    ranks: int
    threads: int  # of each rank, on a CPU
    memory_before: dict[str, Any]  # what advantages remembered of earlier steps
    dropped_rows: list[int]  # rows that were not finite, as numbers among the batch's
    weights: int | None = None  # whose step's checkpoint it began with; 0: the model folder's
    momentum_cleared: bool = False  # of these weights: it is the first step after a rollback
    torch: str | None = None  # version: another one may round otherwise
    adamw: AdamwImplementation = "foreach"  # as of all steps that do not say it
    parity: float = ATTENTION_PARITY  # of steps without `packing`, and of all before there was one
    packing: PackingRule | None = None

    @property
    def packing_rule(self) -> PackingRule:
        """By which its rows were packed."""
        return self.packing or PackingRule(self.parity, aligned=False)

    @classmethod
    def of(cls, groups: Sequence[Group], **others: Any) -> StepInputs:
        """Of these groups; `others` are the other fields, less torch's version and
        AdamW."""
        names = [rollout.rollout_id for group in groups for rollout in group.rollouts]
        assert len(names) == len(set(names)), "a rollout is in a batch once"
        found = [
            GroupInputs(
                group_id=group.group_id,
                rollouts=[
                    RolloutInputs(
                        rollout_id=rollout.rollout_id,
                        reward=rollout.reward,
                        turn_rewards=rollout.turn_rewards,
                        turns=len(rollout.turns),
                    )
                    for rollout in group.rollouts
                ],
            )
            for group in groups
        ]
        return cls(groups=found, torch=version_of("torch"), adamw=ADAMW, **others)
