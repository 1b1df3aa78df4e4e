"""All places that metrics go to besides the store. None of them can stop training."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, Self

from tracegrad.inspect.metric_points import MetricPoint, push_point, step_point
from tracegrad.store import PolicyVersion, StepRecord
from tracegrad_trainer.metrics.config import MetricsSettings
from tracegrad_trainer.metrics.prometheus import PrometheusSink

logger = logging.getLogger(__name__)


class MetricSink(Protocol):
    @property
    def name(self) -> str: ...
    def write(self, point: MetricPoint) -> None: ...
    def close(self) -> None: ...


class MetricSinks:
    """For rank 0. A sink that fails is counted in `failures`, and logged once."""

    def __init__(self, sinks: list[MetricSink]) -> None:
        self.sinks = sinks
        self.failures: Counter[str] = Counter()

    @classmethod
    def open(cls, settings: MetricsSettings, state_dir: Path) -> Self:
        """Raises ValueError: one of them cannot begin; the line names its setting."""
        opened = cls([])
        try:
            for field, make in _wanted(settings, state_dir):
                try:
                    opened.sinks.append(make())
                except OSError as error:
                    raise ValueError(f"metrics.{field}: {error}") from None
        except ValueError:
            opened.close()
            raise
        return opened

    def step(self, record: StepRecord) -> None:
        self._write(step_point(record))

    def pushed(self, version: PolicyVersion) -> None:
        """A version was served, or its push failed."""
        self._write(push_point(version))

    def report_hold(
        self, is_held: bool, count_decisions: Callable[[], Mapping[tuple[str, str], int]]
    ) -> None:
        """Whether training is held, and how often somebody decided about that, for who scrapes:
        `Store.count_decisions`, which is asked for nobody else."""
        for sink in self.sinks:
            if isinstance(sink, PrometheusSink):
                sink.set_held(is_held)
                sink.set_decisions(count_decisions())

    def close(self) -> None:
        for sink in self.sinks:
            self._try(sink, sink.close)

    def _write(self, point: MetricPoint) -> None:
        for sink in self.sinks:
            self._try(sink, lambda sink=sink: sink.write(point))  # type: ignore[misc]
        for sink in self.sinks:
            if isinstance(sink, PrometheusSink):
                for name, times in self.failures.items():
                    sink.failed(name, times)

    def _try(self, sink: MetricSink, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # whatever it is: these are other people's programs
            self.failures[sink.name] += 1
            if self.failures[sink.name] == 1:
                logger.warning("metrics to %s failed, training goes on: %r", sink.name, error)


def _wanted(
    settings: MetricsSettings, state_dir: Path
) -> list[tuple[str, Callable[[], MetricSink]]]:
    """What is asked for, each with the name of its setting; the extras are imported when made."""
    wanted: list[tuple[str, Callable[[], MetricSink]]] = []
    host, port = settings.prometheus_host, settings.prometheus_port
    if port is not None:
        wanted.append(("prometheus_port", lambda: PrometheusSink(host, port)))
    if settings.tensorboard is not None:
        from tracegrad_trainer.metrics.tensorboard import TensorBoardSink

        folder = state_dir / settings.tensorboard
        wanted.append(("tensorboard", lambda: TensorBoardSink(folder)))
    if (wandb := settings.wandb) is not None:
        from tracegrad_trainer.metrics.wandb import WandbSink

        wanted.append(("wandb", lambda: WandbSink(wandb, state_dir)))
    return wanted
