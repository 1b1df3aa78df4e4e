"""How many updates of the policy lie between the weights that sampled a turn and those of now.

A number of a version is never used twice: where a run goes on from a checkpoint, weights that were
served before may be served again under a higher number, and the numbers of versions that came
after that checkpoint belong to updates that are lost. So a difference of numbers is not always a
number of updates: of a checkpoint every 20 steps a crash may skip 20 numbers, and what the same
weights had sampled before would pass for stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracegrad.events import Turn
from tracegrad_trainer.batches.rows import Row

# (the number that weights are served under again, by how many it is above their own number), one
# a resume that skipped numbers, in order.
SkippedVersions = Sequence[tuple[int, int]]
# First and last of each range that a rollback gave up (`Store.rolled_back_versions`).
RolledBackVersions = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class VersionScale:
    """On it a version is as far below `current`, in numbers, as it is away in updates."""

    current: int
    skipped: SkippedVersions = ()
    rolled_back: RolledBackVersions = ()

    def place(self, version: int) -> int:
        """Where a version stands that tokens were recorded with."""
        moved, lost = version, False
        for resumed, by in self.skipped:
            if version < resumed:
                moved += by
                lost = lost or moved > resumed
        if not lost:
            return moved
        # Its updates are gone, and were made again of what there was then: it may be ahead of the
        # present weights, and is never them.
        return self.current - max(1, abs(self.current - moved))

    def is_rolled_back(self, turn: Turn) -> bool:
        """Whether a version that was given up sampled some of it."""
        return any(is_within(version, self.rolled_back) for version, _ in turn.policy_versions)

    def lag(self, turn: Turn) -> int:
        """Updates between a sampled turn's oldest token and now."""
        return self.current - min(self.place(version) for version, _ in turn.policy_versions)

    def placed(self, rows: Iterable[Row]) -> list[Row]:
        """With versions on this scale."""
        return [self._placed(row) for row in rows] if self.skipped else list(rows)

    def _placed(self, row: Row) -> Row:
        known, where = np.unique(row.policy_version, return_inverse=True)
        # -1 is that of context and of demonstrations.
        places = [version if version < 0 else self.place(version) for version in known.tolist()]
        return replace(row, policy_version=np.array(places, np.int32)[where])


def is_within(version: int, ranges: RolledBackVersions) -> bool:
    return any(first <= version <= last for first, last in ranges)
