"""What rank 0 does besides its share of a step: the ledger's side of training.

It leases finished groups, selects what may be trained, and commits each step together with
exactly the turns it used. Nothing here touches the model.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from tracegrad.records import Json
from tracegrad.store import Group, Ledger, StepRecord, Store
from tracegrad_trainer.batches import Selection, select
from tracegrad_trainer.objectives import Memory, advantages
from tracegrad_trainer.settings import TrainerSettings

# How long one call of `next_batch` waits: the other ranks sit in a collective meanwhile.
PATIENCE_S = 5.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Batch:
    """Leased groups, and what of them is trained."""

    groups: list[Group]
    selection: Selection


@dataclass(frozen=True, slots=True)
class ResumePoint:
    step: int
    version: int  # the number that the checkpoint's weights are served under
    checkpoint: str | None  # None: the model folder's weights


class Coordinator:
    def __init__(
        self, settings: TrainerSettings, store: Store, *, stopping: Callable[[], bool]
    ) -> None:
        self.settings = settings
        self.store = store
        self.ledger = Ledger(store)
        self.stopping = stopping
        self.memory: Memory = {}
        self.owner = f"{socket.gethostname()}:{os.getpid()}"

    def resume_point(self) -> ResumePoint:
        """Where the last committed step left off.

        A version whose push failed may have sampled tokens with weights that were not its own:
        its number is not served again.
        """
        last = self.ledger.last_step()
        failed = [v.version for v in self.store.versions() if v.state == "failed"]
        version = max([last.version if last else 0, *(each + 1 for each in failed)])
        if last is None:
            return ResumePoint(0, version, None)
        assert last.checkpoint is not None, "every step has one"
        return ResumePoint(last.step, version, last.checkpoint)

    def next_batch(self, version: int) -> Batch | None:
        """The next batch, or None when nothing was ready for `PATIENCE_S`.

        Groups from which nothing can be trained are consumed here, with their reasons, and cost
        no step.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not self.stopping() and time.monotonic() < deadline:
            groups = self._lease()
            if not groups:
                time.sleep(POLL_S)
                continue
            selection = self._select(groups, version)
            if selection.trained:
                return Batch(groups, selection)
            self.ledger.commit_skipped(selection.skipped, selection.rollouts)
        return None

    def _lease(self) -> list[Group]:
        batches, data = self.settings.batches, self.settings.data
        return self.ledger.lease(
            groups=batches.groups,
            group_size=batches.group_size,
            owner=self.owner,
            ttl_s=data.lease_ttl_s,
            tags=data.tags,
            incomplete_after_s=data.incomplete_after_s,
        )

    def _select(self, groups: list[Group], version: int) -> Selection:
        return select(
            groups,
            self.settings.batches,
            advantages=partial(advantages, self.settings.objective, memory=self.memory),
            current_version=version,
            failed_versions={v.version for v in self.store.versions() if v.state == "failed"},
        )

    def commit(
        self,
        batch: Batch,
        *,
        step: int,
        version: int,
        metrics: Json,
        checkpoint: str,
        dropped_rows: Collection[int],
    ) -> None:
        """The step and exactly its turns, in one transaction."""
        selection = batch.selection.without_rows(dropped_rows, "non_finite")
        self.ledger.commit_step(
            StepRecord(
                step=step,
                version=version,
                settings=self.settings.stored(),
                metrics={**selection.stats, **metrics},
                checkpoint=checkpoint,
            ),
            trained=selection.trained,
            skipped=selection.skipped,
            rollouts=selection.rollouts,
        )

    def give_up(self, batch: Batch, reason: str) -> None:
        """Consumes a batch whose step did not change the weights."""
        selection = batch.selection
        skipped = selection.skipped | dict.fromkeys(selection.trained, reason)
        self.ledger.commit_skipped(skipped, selection.rollouts)
