"""Cells of several workers: sums that never go backwards, histograms, what is scraped."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tracegrad.inspect.reasons import UNTRAINED_TEXTS
from tracegrad.inspect.rollout_time import STAGES
from tracegrad.proxy.metrics.counters import MetricCells, ProxyMetrics
from tracegrad.proxy.metrics.exposition import exposition
from tracegrad.proxy.metrics.names import (
    CALL_STAGES,
    DOWN,
    OTHER,
    PREFIX,
    SECONDS,
    UNTRAINABLE,
    UP,
    metrics_of,
)


def scraped(cells: MetricCells) -> dict[tuple[str, ...], float]:
    """As another's reader reads it: name and labels' values -> value."""
    return {
        (sample.name.removeprefix(PREFIX), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(exposition(cells))
        for sample in family.samples
    }


def test_counts_of_all_workers_are_summed() -> None:
    cells = MetricCells(3)
    for worker in range(3):
        ProxyMetrics(cells, worker).add("calls_total", "chat", "2xx", number=worker + 1)
    found = scraped(cells)
    assert found["calls_total", "chat", "2xx"] == 6
    assert found["calls_total", "chat", "5xx"] == 0, "there before the first of it"


def test_a_worker_that_is_started_again_goes_on_from_its_counts() -> None:
    cells = MetricCells(2)
    first = ProxyMetrics(cells, 1)
    first.add("sampled_tokens_total", number=10)
    first.add("calls_in_flight", number=3)
    ProxyMetrics(cells, 0).add("calls_in_flight")
    cells.forget_gauges(1)
    assert scraped(cells)["calls_in_flight",] == 1, "its calls ended with it"
    ProxyMetrics(cells, 1).add("sampled_tokens_total", number=5)
    assert scraped(cells)["sampled_tokens_total",] == 15


def test_forked_workers_write_the_same_cells() -> None:
    cells = MetricCells(2)
    pid = os.fork()
    if pid == 0:
        ProxyMetrics(cells, 1).add("sampled_tokens_total", number=0.5)
        os._exit(0)
    os.waitpid(pid, 0)
    assert scraped(cells)["sampled_tokens_total",] == 0.5


def test_what_all_workers_have_alike_is_not_summed() -> None:
    cells = MetricCells(3, ["http://a", "http://b", "http://c"])
    for worker in (0, 1):  # the third has only started
        metrics = ProxyMetrics(cells, worker)
        metrics.set("policy_version", value=7)
        metrics.set("gate_held", value=1)
        metrics.add("gate_held_seconds_total", number=2.5)
        metrics.set("upstream_up", "http://a", value=UP)
        metrics.set("upstream_up", "http://b", value=DOWN if worker else UP)
    found = scraped(cells)
    assert found["policy_version",] == 7
    assert found["gate_held",] == 1
    assert found["gate_held_seconds_total",] == 2.5
    assert found["upstream_up", "http://a"] == 1
    assert found["upstream_up", "http://b"] == 0
    assert found["upstream_up", "http://c"] == 0


@settings(deadline=None)
@given(st.lists(st.floats(0, 1000, allow_nan=False) | st.sampled_from(SECONDS), max_size=40))
def test_a_histogram_counts_what_is_at_most_each_bound(values: list[float]) -> None:
    cells = MetricCells(2)
    for index, value in enumerate(values):
        ProxyMetrics(cells, index % 2).observe("stage_seconds", "gate", seconds=value)
    found = scraped(cells)
    for bound in SECONDS:
        at_most = sum(value <= bound for value in values)
        assert found["stage_seconds_bucket", "gate", str(bound)] == at_most
    assert found["stage_seconds_bucket", "gate", "+Inf"] == len(values)
    assert found["stage_seconds_count", "gate"] == len(values)
    assert found["stage_seconds_sum", "gate"] == pytest.approx(sum(values))
    assert found["stage_seconds_count", "queue"] == 0


def test_a_word_that_nobody_foresaw_is_another() -> None:
    metrics = ProxyMetrics()
    metrics.add("turns_untrainable_total", "a word of tomorrow")
    assert scraped(metrics.cells)["turns_untrainable_total", OTHER] == 1
    with pytest.raises(KeyError):
        metrics.add("forks_total", "a reason that is none")


def test_series_are_as_many_as_there_will_ever_be() -> None:
    for name, metric in metrics_of(["http://a"]).items():
        assert (metric.kind == "counter") == name.endswith("_total")
        assert all(len(values) <= 40 for values in metric.labels.values())
    assert len(scraped(MetricCells(1, ["http://a"]))) < 400


def test_its_words_are_those_of_rollouts_and_reasons() -> None:
    assert set(CALL_STAGES) <= set(STAGES)
    assert set(UNTRAINABLE) - {OTHER} <= set(UNTRAINED_TEXTS)


def test_a_url_with_quotes_is_escaped() -> None:
    name = 'http://a/"\\\n'
    cells = MetricCells(1, [name])
    ProxyMetrics(cells).set("upstream_up", name, value=UP)
    assert scraped(cells)["upstream_up", name] == 1
