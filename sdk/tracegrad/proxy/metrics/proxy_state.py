"""How the proxy is now, all workers together: what its metrics say, for people to look at."""

from __future__ import annotations

from tracegrad.events import Json
from tracegrad.proxy.metrics.counters import MetricCells, ProxyMetrics
from tracegrad.proxy.metrics.names import UP
from tracegrad.ui.proxy_state import ProxyState


def proxy_state(metrics: ProxyMetrics, health: Json, own_pid: int) -> ProxyState:
    """`health`: what /healthz answers."""
    metrics.sample()
    cells = metrics.cells
    [in_flight], [turns], [held] = (
        _by_label(cells, name).values()
        for name in ("calls_in_flight", "turns_committed_total", "gate_held")
    )
    return ProxyState(
        version=health["version"],
        workers=health.get("workers", [own_pid]),
        in_flight=int(in_flight),
        waiting=_counts(cells, "calls_waiting"),
        held=bool(held),
        up={url: value == UP if value else None for url, value in _servers(cells).items()},
        calls=_counts(cells, "calls_total"),
        turns=int(turns),
        untrainable=_counts(cells, "turns_untrainable_total"),
        lost=_counts(cells, "turns_lost_total"),
        submissions=health["writer"]["submissions"],
        submission_bytes=health["writer"]["bytes"],
    )


def _servers(cells: MetricCells) -> dict[str, float]:
    return _by_label(cells, "upstream_up") if "upstream_up" in cells.metrics else {}


def _counts(cells: MetricCells, name: str) -> dict[str, int]:
    """Those above 0, the largest first."""
    found = {label: int(value) for label, value in _by_label(cells, name).items() if value > 0}
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def _by_label(cells: MetricCells, name: str) -> dict[str, float]:
    """Of a metric that is no histogram, by its last label; sums over the others."""
    found: dict[str, float] = {}
    for series in cells.series:
        if series.name == name:
            label = series.labels[-1][1] if series.labels else ""
            found[label] = found.get(label, 0.0) + cells.combined(series)[0]
    return found
