"""docs/metrics.md has the proxy's table, and docs/grafana.json asks for what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tracegrad.inspect.step_metrics import METRICS as TRAINER_METRICS
from tracegrad.proxy.metrics.names import PREFIX, metrics_of
from tracegrad_trainer.metrics.prometheus import PREFIX as TRAINER_PREFIX

DOCS = Path(__file__).parents[4] / "docs"
NAME = re.compile(r"\btracegrad_[a-z0-9_]+")
# What `PrometheusSink` makes of stages, reasons and decisions.
TRAINER_COUNTERS = {"step", "held", "seconds_total", "turns_not_trained_total", "decisions_total"}


def test_the_page_has_the_table() -> None:
    wanted = ["| metric | kind | labels | |", "|---|---|---|---|"]
    for name, metric in metrics_of().items():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        wanted.append(f"| `{PREFIX}{name}` | {metric.kind} | {labels} | {metric.what} |")
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert "\n".join(wanted) + "\n" in page, "\n".join(wanted)


def scraped_names() -> set[str]:
    found = {TRAINER_PREFIX + name for name in TRAINER_COUNTERS}
    found |= {TRAINER_PREFIX + re.sub(r"\W", "_", name) for name in TRAINER_METRICS}
    for name, metric in metrics_of().items():
        ends = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found |= {f"{PREFIX}{name}{end}" for end in ends}
    return found


def queries(panels: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for panel in panels:
        yield from queries(panel.get("panels", []))
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def test_every_metric_of_the_dashboard_is_scraped() -> None:
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    known, asked = scraped_names(), set()
    for title, query in queries(board["panels"]):
        names = set(NAME.findall(query))
        assert names, f"{title}: {query} asks for nothing"
        assert names <= known, f"{title}: {names - known} are no metrics"
        asked |= names
    # Of the proxy it shows all there is.
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in asked}
    assert {PREFIX + name for name in metrics_of()} <= shown


def test_labels_of_the_dashboard_are_those_of_its_metrics() -> None:
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    for title, query in queries(board["panels"]):
        for name, chosen in re.findall(rf"{PREFIX}(\w+)\{{(.*?)\}}", query):
            metric = metrics_of()[re.sub("_(bucket|sum|count)$", "", name)]
            for label, value in re.findall(r'(\w+)="([^"]*)"', chosen):
                assert value in metric.labels[label], f"{title}: {query}"


def test_panels_do_not_lie_on_each_other() -> None:
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
