"""Steps that were made and are not committed yet, and the checkpoint that is to have them.

A step is committed only when its update is on the disk. One checkpoint may have those of several
steps (`checkpoint.every_steps`): they wait for it and are committed together, in one transaction.
What is killed before that is made again from the last checkpoint, of the same turns, which nobody
else could lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tracegrad.events import Json
from tracegrad.store import Group, LedgerError, StepCommit
from tracegrad.store.checkpoint_manifest import manifest_digest
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine.checkpoint.manifest import discard_checkpoint
from tracegrad_trainer.engine.checkpoint.save_load import CheckpointSaver
from tracegrad_trainer.engine.config import CheckpointSettings
from tracegrad_trainer.engine.step.learner import Learner
from tracegrad_trainer.metrics import MetricSinks
from tracegrad_trainer.rl.committed_checkpoint import CommittedCheckpoint
from tracegrad_trainer.rl.coordinator import Coordinator
from tracegrad_trainer.utils.distributed import StopAllRanks, is_rank_zero, run_on_rank_zero


@dataclass(frozen=True, slots=True)
class PendingStep:
    """`commit` and `groups`, what it has leased, are rank 0's."""

    number: int
    commit: StepCommit | None = None
    groups: Sequence[Group] = ()


class PendingSteps:
    """Every rank makes the same calls in the same order; rank 0 alone has a coordinator."""

    def __init__(
        self, settings: TrainerSettings, coordinator: Coordinator | None, sinks: MetricSinks
    ) -> None:
        self.saver = CheckpointSaver(settings.checkpoints)
        # The last one that was committed, or gone on from; None: the model folder's weights.
        self.parent: CommittedCheckpoint | None = None
        # Steps whose checkpoints stay, whatever their age; rank 0's.
        self.protected: Callable[[], Collection[int]] = tuple
        self._settings = settings.checkpoint
        self._coordinator = coordinator
        self._sinks = sinks
        self._steps: list[PendingStep] = []
        self._folder: Path | None = None  # of the checkpoint that is being written
        self._saved_step = 0  # the last step that it, or the one before it, has
        self._saved_at = self._made_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def numbers(self) -> list[int]:
        return [one.number for one in self._steps]

    @property
    def groups(self) -> list[Group]:
        """All that they have leased; rank 0's."""
        return [group for one in self._steps for group in one.groups]

    @property
    def last(self) -> int:
        """The step whose weights the next one begins with; 0: the model folder's."""
        if self._steps:
            return self._steps[-1].number
        return self.parent.step if self.parent else 0

    def has_checkpoint(self, step: int) -> bool:
        """Whether it has one of its own, or gets one now; 0: the model folder's weights, which need
        none."""
        parent = self.parent.step if self.parent else 0
        return step in (0, parent) or (self._folder is not None and step == self._saved_step)

    @property
    def is_written(self) -> bool:
        """Whether the checkpoint that was being written can be committed."""
        return self._folder is not None and not self.saver.busy

    def is_due(self, *, more: int = 0) -> bool:
        """Whether the steps that no checkpoint has, and `more`, are to get one; rank 0 decides."""
        return checkpoint_is_due(
            self._settings,
            steps=self._unsaved + more,
            seconds=time.monotonic() - self._saved_at,
            busy=self.saver.busy,
        )

    @property
    def is_idle(self) -> bool:
        """Whether steps that no checkpoint has wait for long: nothing comes to train; rank 0
        decides."""
        waited = time.monotonic() - self._made_at
        return self._unsaved > 0 and self._folder is None and waited >= self._settings.idle_s

    @property
    def _unsaved(self) -> int:
        return sum(one.number > self._saved_step for one in self._steps)

    def add(self, step: PendingStep) -> None:
        self._steps.append(step)
        self._made_at = time.monotonic()

    def save(
        self, learner: Learner, step: int, counters: dict[str, Any], base: Json | None
    ) -> None:
        """Begins the checkpoint of `step`, the learner's weights; none is being written. A
        collective."""
        assert self._folder is None, "commit the one before"
        parent = self.parent.as_parent() if self.parent and is_rank_zero() else None
        self._folder = self.saver.start(learner, step, counters, parent=parent, base=base)
        self._saved_step, self._saved_at = step, time.monotonic()

    def await_written(self) -> None:
        """Raises CheckpointError: as `commit_saved`."""
        self.saver.wait()

    def commit_saved(self) -> None:
        """Commits the steps that the checkpoint has, when it is whole; waits for that. Nothing to
        do where none is being written.

        Raises:
            CheckpointError: it could not be written; the steps are not committed.
            LedgerError: the ledger refused one of them; none is committed, the checkpoint is gone.
        """
        folder = self._folder
        if folder is None:
            return
        self.await_written()
        saved = [one for one in self._steps if one.number <= self._saved_step]
        self.parent = run_on_rank_zero(lambda: self._commit(saved, folder))
        self._steps = self._steps[len(saved) :]
        self._folder = None
        # Only now: until here a restart would have gone on from the one before.
        self.saver.prune(
            keep=self._settings.keep,
            keep_every=self._settings.keep_every,
            counts=self._coordinator.is_committed if self._coordinator else bool,
            protected=self.protected() if self._coordinator else (),
        )

    def _commit(self, saved: Sequence[PendingStep], folder: Path) -> CommittedCheckpoint:
        assert self._coordinator is not None
        digest, parent = manifest_digest(folder), self.parent
        commits = _chained([one.commit for one in saved if one.commit], folder, digest, parent)
        try:
            self._coordinator.commit(commits, [group for one in saved for group in one.groups])
        except LedgerError as error:
            discard_checkpoint(folder)  # nobody may take it for the step's that has the number
            raise type(error)(
                f"{error}; this run's {_given_up(saved)}: start again to go on from the last"
                " committed step, or give the run a store of its own (proxy.store)"
            ) from error
        except StopAllRanks:
            discard_checkpoint(folder)  # its steps are given back
            raise
        for one in commits:
            self._sinks.step(one.step)
        made = commits[-1].step
        return CommittedCheckpoint(made.step, folder, digest, made.run_id)


def checkpoint_is_due(
    interval: CheckpointSettings, *, steps: int, seconds: float, busy: bool
) -> bool:
    """After `steps` steps that no checkpoint has, `seconds` since the last one began to be written.

    What was asked for by steps is exact: training waits for the disk where that is `busy` with the
    one before. What was asked for by time waits itself.
    """
    if interval.steps_between is not None and steps >= interval.steps_between:
        return True
    return interval.every_s is not None and seconds >= interval.every_s and not busy


def _chained(
    commits: Sequence[StepCommit], folder: Path, digest: str, parent: CommittedCheckpoint | None
) -> list[StepCommit]:
    """With the checkpoint that they descend from; the last of them has the new one."""
    chained = [
        replace(one, step=replace(one.step, parent_digest=parent.digest if parent else None))
        for one in commits
    ]
    own = replace(chained[-1].step, checkpoint=str(folder), manifest_digest=digest)
    return [*chained[:-1], replace(chained[-1], step=own)]


def _given_up(steps: Sequence[PendingStep]) -> str:
    if len(steps) == 1:
        return f"step {steps[0].number} is given up and its checkpoint removed"
    between = f"{steps[0].number} to {steps[-1].number}"
    return f"steps {between} are given up and their checkpoint removed"
