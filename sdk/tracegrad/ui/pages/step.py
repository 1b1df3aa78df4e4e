"""A step: when and of what weights, its numbers, what it was made of, and how to make it again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tracegrad.inspect.display_text import metric_text
from tracegrad.inspect.metric_points import current_names, push_point, step_point
from tracegrad.inspect.step_metrics import SECTIONS, find_metric
from tracegrad.store import StepHistory, StepRecord, Store
from tracegrad.store.read.versions import pushes_of_versions
from tracegrad.ui.pages.replay_commands import what_if
from tracegrad.ui.pages.step_batch import Place, batch_values, read_batch
from tracegrad.ui.pages.training import PATH, path_of

_OTHERS = "Others"


@dataclass(frozen=True, slots=True)
class ShownMetric:
    """`what` "": no version of this program says it."""

    name: str
    value: str
    unit: str
    what: str


def step_values(store: Store, number: int, place: Place) -> dict[str, Any] | None:
    """What the template needs; None: there is no such step. WrongLink: `place` is none of its."""
    history = StepHistory(store)
    record = history.step(number)
    if record is None:
        return None
    before, after = history.neighbours(number)
    batch = read_batch(record)
    path = path_of(number)
    with store.reading() as connection:
        push = pushes_of_versions(connection, [record.version]).get(record.version)
        shown = None if batch is None else batch_values(connection, number, path, batch, place)
    numbers = step_point(_named(record)).values
    if push is not None:
        numbers |= push_point(push).values
    return {
        "record": record,
        "push": push,
        "sections": list(_sections(numbers)),
        "batch": shown,
        "what_if": what_if(history, record),
        "path": path,
        "up": PATH,
        "before": None if before is None else path_of(before),
        "after": None if after is None else path_of(after),
    }


def _named(record: StepRecord) -> StepRecord:
    return StepRecord(
        step=record.step, version=record.version, metrics=current_names(record.metrics)
    )


def _sections(numbers: dict[str, float]) -> Iterator[tuple[str, list[ShownMetric]]]:
    """As docs/metrics.md has them; those without a number are left out."""
    left = dict(numbers)
    for title, known in SECTIONS.items():
        names = [name for pattern in known for name in _named_so(pattern, left)]
        shown = [_shown(name, left.pop(name)) for name in dict.fromkeys(names)]
        if shown:
            yield title, shown
    if left:
        yield _OTHERS, [_shown(name, value) for name, value in sorted(left.items())]


def _named_so(pattern: str, numbers: dict[str, float]) -> list[str]:
    """A metric of the table, or all of a family, whose name ends in …"""
    if not pattern.endswith("…"):
        return [pattern] if pattern in numbers else []
    return sorted(name for name in numbers if name.startswith(pattern[:-1]))


def _shown(name: str, value: float) -> ShownMetric:
    metric = find_metric(name)
    unit, what = ("", "") if metric is None else (metric.unit, metric.what)
    return ShownMetric(name, metric_text(value, unit), "" if unit in ("s", "share") else unit, what)
