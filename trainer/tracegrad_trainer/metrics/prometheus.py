"""Metrics for Prometheus to scrape: `GET /metrics` on a port of our own."""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from tracegrad.inspect.metric_points import MetricPoint
from tracegrad.inspect.step_metrics import SECONDS, SKIPPED, find_metric

PREFIX = "tracegrad_trainer_"


class PrometheusSink:
    """The last step's metrics as gauges; steps, seconds by stage and turns that were not trained,
    by reason, as counters since this process began; whether training is held, and what was decided
    about versions."""

    name = "prometheus"

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError: the port is taken, or the address is not ours."""
        self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._step = Gauge(f"{PREFIX}step", "the last optimizer step", registry=self.registry)
        self._seconds = Counter(
            f"{PREFIX}seconds", "time by stage", ["stage"], registry=self.registry
        )
        self._not_trained = Counter(
            f"{PREFIX}turns_not_trained", "by reason", ["reason"], registry=self.registry
        )
        self._held = Gauge(f"{PREFIX}held", "1: training is held", registry=self.registry)
        self._decisions = Counter(
            f"{PREFIX}decisions", "about versions", ["kind", "by"], registry=self.registry
        )
        self._decided: Mapping[tuple[str, str], int] = {}
        self._server, self._thread = start_http_server(port, host, self.registry)

    @property
    def port(self) -> int:
        return self._server.server_port

    def write(self, point: MetricPoint) -> None:
        for name, value in point.values.items():
            if name.startswith(SECONDS):
                self._seconds.labels(name.removeprefix(SECONDS)).inc(value)
            elif name.startswith(SKIPPED):
                self._not_trained.labels(name.removeprefix(SKIPPED)).inc(value)
            else:
                self._gauge(name).set(value)
        self._step.set(point.step)

    def set_held(self, is_held: bool) -> None:
        self._held.set(is_held)

    def set_decisions(self, counts: Mapping[tuple[str, str], int]) -> None:
        """All that the store has: a rollback ends this process, and its counters with it."""
        for (kind, by), count in counts.items():
            self._decisions.labels(kind, by).inc(count - self._decided.get((kind, by), 0))
        self._decided = counts

    def failed(self, sink: str, times: int) -> None:
        """How often another sink has failed."""
        self._gauge(f"sink_failures/{sink}").set(times)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            known = find_metric(name)
            words = f"{known.what} ({known.unit})" if known else name
            exported = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            self._gauges[name] = Gauge(exported, words, registry=self.registry)
        return self._gauges[name]
