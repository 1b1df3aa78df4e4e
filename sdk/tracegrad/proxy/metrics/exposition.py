"""Prometheus's text format, version 0.0.4: what `GET /metrics` says.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from tracegrad.proxy.metrics.counters import MetricCells, Series
from tracegrad.proxy.metrics.names import PREFIX, SECONDS, UP

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(cells: MetricCells) -> str:
    return "".join(f"{line}\n" for line in _lines(cells))


def _lines(cells: MetricCells) -> Iterator[str]:
    for name, group in groupby(cells.series, key=lambda series: series.name):
        metric = cells.metrics[name]
        yield f"# HELP {PREFIX}{name} {_escaped(metric.what, quotes=False)}"
        yield f"# TYPE {PREFIX}{name} {metric.kind}"
        for series in group:
            values = cells.combined(series)
            if metric.kind == "histogram":
                yield from _histogram(series, values)
            else:
                value = values[0]
                if name == "upstream_up":
                    value = float(value == UP)
                yield f"{PREFIX}{name}{_labels(series)} {_number(value)}"


def _histogram(series: Series, values: list[float]) -> Iterator[str]:
    *counts, total = values
    so_far = 0.0
    for bound, count in zip((*map(str, SECONDS), "+Inf"), counts, strict=True):
        so_far += count
        labels = _labels(series, ("le", bound))
        yield f"{PREFIX}{series.name}_bucket{labels} {_number(so_far)}"
    yield f"{PREFIX}{series.name}_sum{_labels(series)} {_number(total)}"
    yield f"{PREFIX}{series.name}_count{_labels(series)} {_number(so_far)}"


def _labels(series: Series, *more: tuple[str, str]) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in (*series.labels, *more)]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)
