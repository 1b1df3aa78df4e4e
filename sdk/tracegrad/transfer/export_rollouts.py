"""What of a store an export holds, as a stream of objects. Memory holds a few rollouts of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tracegrad.events import Json
from tracegrad.store.copy.export_records import (
    iter_rollouts,
    iter_spans_without_rollout,
    iter_task_groups,
    load_steps,
    load_versions,
)
from tracegrad.store.filters import ALL, RolloutFilter
from tracegrad.store.store import Store
from tracegrad.store.types import HELD_OUT
from tracegrad.transfer.layouts import ExportLayout
from tracegrad.transfer.serialize import (
    rollout_object,
    span_without_rollout_object,
    step_object,
    turn_objects,
    version_object,
)


@dataclass(slots=True)
class ExportCounts:
    """What was written, by kind, and what was left out, by reason."""

    written: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutExport:
    """`trained`: only rollouts of which a turn was trained, or none was."""

    store: Store
    wanted: RolloutFilter = ALL
    trained: bool | None = None
    text: bool = True
    counts: ExportCounts = field(default_factory=ExportCounts)

    def rollouts(self) -> Iterator[Json]:
        """A copy that can be imported: whatever an object refers to comes before it.

        All that the store has where nothing is filtered; else the rollouts that are wanted, with
        the steps and versions that they name.
        """
        whole = self.wanted.matches_all and self.trained is None
        for value in self._objects(whole):
            self.counts.written[value["kind"]] += 1
            yield value

    def _objects(self, whole: bool) -> Iterator[Json]:
        steps: set[int] = set()
        versions: set[int] = set()
        if whole:
            for version in load_versions(self.store):
                versions.add(version.current.version)
                yield version_object(version)
            for step in load_steps(self.store):
                steps.add(step.step)
                yield step_object(step)
        copies = iter_rollouts(self.store, self.wanted, trained=self.trained, raw=self.text)
        for copy in copies:
            # In a whole copy only those that were made meanwhile.
            if new := copy.steps - steps:
                yield from map(step_object, load_steps(self.store, sorted(new)))
                steps |= new
            if new := copy.versions - versions:
                yield from map(version_object, load_versions(self.store, sorted(new)))
                versions |= new
            yield rollout_object(copy, text=self.text)
        if whole:
            # The last: a span without a rollout joins the first one that comes with its trace.
            for spans in iter_spans_without_rollout(self.store):
                yield from map(span_without_rollout_object, spans)

    def turns(self) -> Iterator[Json]:
        """One flat object a turn (`serialize.turn_objects`)."""
        copies = iter_rollouts(
            self.store, self.wanted, trained=self.trained, raw=False, expert_routing=False
        )
        for copy in copies:
            for turn in turn_objects(copy, trained=self.trained):
                self.counts.written["turn"] += 1
                yield turn

    def layout(self, layout: ExportLayout) -> Iterator[Json]:
        """Rows for trainers: without held-out rollouts, unless they are asked for."""
        groups = iter_task_groups(self.store, self.wanted, trained=self.trained, raw=layout.text)
        for group in groups:
            eligible = [one for one in group if not one.held_out or self.wanted.held_out]
            if held_out := len(group) - len(eligible):
                self.counts.left_out[f"rollouts: {HELD_OUT}"] += held_out
            for row in layout.rows(eligible, self.counts.left_out) if eligible else ():
                self.counts.written["row"] += 1
                yield row
