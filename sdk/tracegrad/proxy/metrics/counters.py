"""Counts of all workers, each in cells of its own: nobody takes a lock, and nobody asks.

A cell is 8 bytes in memory that all workers map. Counters of a worker that ended stay, and the one
that is started in its place goes on from there: no sum ever goes backwards. Gauges are put back.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from tracegrad.proxy.metrics.names import OTHER, SECONDS, Metric, metrics_of

_CELL_BYTES = 8
# Of a histogram: one for each bound, what is above them all, the sum.
_BUCKETS = len(SECONDS) + 1
_HISTOGRAM_CELLS = _BUCKETS + 1


class Series(NamedTuple):
    """One combination of a metric's labels. `cell`: its first."""

    name: str
    labels: tuple[tuple[str, str], ...]
    cell: int


class MetricCells:
    """Made before workers are forked. `upstreams`: as `metrics_of`."""

    def __init__(self, workers: int = 1, upstreams: Sequence[str] = ()) -> None:
        self.metrics: Mapping[str, Metric] = metrics_of(upstreams)
        self.series = list(_laid_out(self.metrics))
        last = self.series[-1]
        self._size = last.cell + _cells_of(self.metrics[last.name])
        self._workers = workers
        memory = mmap.mmap(-1, _CELL_BYTES * self._size * workers)
        self._cells = memoryview(memory).cast("d")

    def of(self, worker: int) -> memoryview[float]:
        return self._cells[worker * self._size : (worker + 1) * self._size]

    def forget_gauges(self, worker: int) -> None:
        """The worker is gone, and nobody else writes its cells."""
        own = self.of(worker)
        for series in self.series:
            if self.metrics[series.name].kind == "gauge":
                own[series.cell] = 0.0

    def combined(self, series: Series) -> list[float]:
        """Of all workers: one value, or the counts of a histogram's buckets and their sum."""
        metric = self.metrics[series.name]
        parts = [
            self.of(worker)[series.cell : series.cell + _cells_of(metric)].tolist()
            for worker in range(self._workers)
        ]
        if metric.combine == "sum":
            return [sum(values) for values in zip(*parts, strict=True)]
        values = [part[0] for part in parts]
        if metric.combine == "max":
            return [max(values)]
        return [min((value for value in values if value), default=0.0)]


def _laid_out(metrics: Mapping[str, Metric]) -> Iterator[Series]:
    cell = 0
    for name, metric in metrics.items():
        for values in product(*metric.labels.values()):
            yield Series(name, tuple(zip(metric.labels, values, strict=True)), cell)
            cell += _cells_of(metric)


def _cells_of(metric: Metric) -> int:
    return _HISTOGRAM_CELLS if metric.kind == "histogram" else 1


class ProxyMetrics:
    """One worker's hand on its cells. A call costs it some microseconds, a token nothing."""

    def __init__(self, cells: MetricCells | None = None, worker: int = 0) -> None:
        """Without `cells` they are the process's alone."""
        self.cells = cells or MetricCells()
        self._own = self.cells.of(worker)
        self._at = {
            (series.name, *(value for _, value in series.labels)): series.cell
            for series in self.cells.series
        }
        # What is read and not counted is looked at here, before anybody is told.
        self.samplers: list[Callable[[], None]] = []

    def add(self, name: str, *labels: str, number: float = 1.0) -> None:
        """A word that the label does not have is `other`."""
        cell = self._at.get((name, *labels))
        if cell is None:
            cell = self._at[name, *labels[:-1], OTHER]
        self._own[cell] += number

    def set(self, name: str, *labels: str, value: float) -> None:
        self._own[self._at[name, *labels]] = value

    def observe(self, name: str, *labels: str, seconds: float) -> None:
        cell = self._at[name, *labels]
        self._own[cell + bisect_left(SECONDS, seconds)] += 1.0
        self._own[cell + _BUCKETS] += seconds

    def sample(self) -> None:
        for sampler in self.samplers:
            sampler()
