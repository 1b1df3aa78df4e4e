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
from tracegrad_trainer.objectives import advantages
from tracegrad_trainer.settings import TrainerSettings

# How long one call of `next_batch` waits: the other ranks sit in a collective meanwhile.
PATIENCE_S = 5.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Batch:
    """Leased groups, and what of them is trained."""

    groups: list[Group]
    selection: Selection


class Coordinator:
    def __init__(
        self, settings: TrainerSettings, store: Store, *, stopping: Callable[[], bool]
    ) -> None:
        self.settings = settings
        self.store = store
        self.ledger = Ledger(store)
        self.stopping = stopping
        self.owner = f"{socket.gethostname()}:{os.getpid()}"

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
            advantages=partial(advantages, self.settings.objective),
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
        selection = batch.selection
        dropped = {
            turn: "non_finite" for row in dropped_rows for turn in selection.rows[row].kept_turn_ids
        }
        self.ledger.commit_step(
            StepRecord(
                step=step,
                version=version,
                settings=self.settings.stored(),
                metrics={**selection.stats, **metrics},
                checkpoint=checkpoint,
            ),
            trained=[turn for turn in selection.trained if turn not in dropped],
            skipped=selection.skipped | dropped,
            rollouts=selection.rollouts,
        )

    def give_up(self, batch: Batch, reason: str) -> None:
        """Consumes a batch whose step did not change the weights."""
        selection = batch.selection
        skipped = selection.skipped | dict.fromkeys(selection.trained, reason)
        self.ledger.commit_skipped(skipped, selection.rollouts)
