"""`GET /metrics`: the counts of all workers, whichever of them is asked."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tracegrad.protocol import METRICS_PATH
from tracegrad.proxy.engine.intake_gate import IntakeGate
from tracegrad.proxy.engine.upstreams import Upstream, UpstreamPool
from tracegrad.proxy.engine.weight_gate import WeightUpdateGate
from tracegrad.proxy.http.request_body import BodyReader
from tracegrad.proxy.metrics.counters import ProxyMetrics
from tracegrad.proxy.metrics.exposition import CONTENT_TYPE, exposition
from tracegrad.proxy.metrics.names import DOWN, UP
from tracegrad.urls import masked


def metrics_route(metrics: ProxyMetrics) -> Route:
    async def read(_: Request) -> Response:
        metrics.sample()
        return Response(exposition(metrics.cells), media_type=CONTENT_TYPE)

    return Route(METRICS_PATH, read)


class GaugeSampler:
    """Writes down what this worker's parts are like now, and how long its gate was held."""

    def __init__(
        self,
        metrics: ProxyMetrics,
        gate: WeightUpdateGate,
        upstream: Upstream,
        bodies: BodyReader,
        intake: IntakeGate | None = None,
    ) -> None:
        self._metrics = metrics
        self._gate = gate
        self._upstream = upstream
        self._bodies = bodies
        self._intake = intake
        self._counted_s = 0.0  # of the gate's holds

    def __call__(self) -> None:
        metrics, state = self._metrics, self._gate.state()
        metrics.set("calls_waiting", "gate", value=state["waiting"])
        if self._intake is not None:
            metrics.set("calls_waiting", "intake", value=self._intake.waiting)
        metrics.set("gate_held", value=state["held"])
        metrics.set("policy_version", value=state["version"])
        held_s = self._gate.ended_holds_s
        metrics.add("gate_held_seconds_total", number=held_s - self._counted_s)
        self._counted_s = held_s
        used, limit = self._bodies.memory()
        metrics.set("body_bytes", value=used)
        metrics.set("body_limit_bytes", value=limit)
        if isinstance(self._upstream, UpstreamPool):
            found = self._upstream.state()
            metrics.set("calls_waiting", "engine", value=found["waiting"])
            for server in found["servers"]:
                up = UP if server["up"] else DOWN
                metrics.set("upstream_up", masked(server["url"]), value=up)
