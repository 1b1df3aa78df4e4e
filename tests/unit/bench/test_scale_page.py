"""The page of `python -m bench.scale`, of figures that were made up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from bench.scale.day import Done, Outcome, Span, Used
from bench.scale.demands import Demands
from bench.scale.measure import Found, Measured, sample
from bench.scale.needs import LONGER_OUTPUTS, LONGER_REPLIES
from bench.scale.report import bottlenecks, needs_of, page, peak_calls_s, sensitivity_table
from bench.scale.workload import LARGE_MODEL, SMALL_MODEL, Workload

WORKLOAD = Workload()


def hour(number: int, calls: float, *, proxy_s: float, writer_s: float, server_s: float) -> Span:
    done = Done(calls, calls / 4, calls / 12, 8e3 * calls, 500 * calls, 190 * calls, 0.1 * calls)
    done.agent_bytes, done.wall_s = 30e3 * calls, calls / 100
    used = Used(
        proxy_cpu_s=proxy_s * calls,
        writer_s=writer_s * calls,
        writer_cpu_s=writer_s * calls / 2,
        writer_delay_s=writer_s * calls / 10,
        commits=calls / 2,
        events=calls * 1.25,
        turns=calls,
        database_cpu_s=server_s * calls,
        store_bytes=8e3 * calls,
        engine_bytes=100e3 * calls,
    )
    return Span(number * 3_600.0, (number + 1) * 3_600.0, done, used, 300 << 20)


def measured(name: str, every: int, **demands: float) -> Measured:
    hours = tuple(hour(at, calls, **demands) for at, calls in enumerate((720.0, 3_600.0, 0.0)))
    alone = (hour(0, 100.0, **demands),)
    return Measured(name, Outcome(every, 10, hours), Outcome(900, 1, alone), text_share=0.3)


@pytest.fixture
def found() -> Found:
    sqlite = measured("SQLite", 20, proxy_s=0.004, writer_s=0.0025, server_s=0.0)
    server = measured("PostgreSQL", 25, proxy_s=0.005, writer_s=0.003, server_s=0.002)
    one_by_one = sqlite.one_by_one
    variants = {
        (LONGER_OUTPUTS, 2.0): replace(one_by_one, proxy_s=0.006),
        (LONGER_OUTPUTS, 0.5): one_by_one,
        (LONGER_REPLIES, 0.5): one_by_one,
        (LONGER_REPLIES, 2.0): one_by_one,
    }
    return Found(WORKLOAD, SMALL_MODEL, (sqlite, server), variants)


def cells(table: str, *starts: str) -> list[str]:
    for line in table.splitlines():
        found = [cell.strip() for cell in line.strip("|").split("|")]
        if found[: len(starts)] == list(starts):
            return found
    raise AssertionError(f"no row {starts} in {table}")


def test_loads_of_some_agents_are_those_of_all(found: Found) -> None:
    sqlite, server = found.databases
    assert sqlite.day.peak.begin == 3_600
    assert peak_calls_s(sqlite) == pytest.approx(20)
    assert peak_calls_s(server) == pytest.approx(25)
    assert Demands.of(sqlite.day.peak, sqlite.day.whole) == sqlite.at_peak
    assert sqlite.at_peak.proxy_s == pytest.approx(0.004)
    assert sqlite.at_peak.store_bytes == pytest.approx(8_000)


def test_the_first_bottleneck_is_named_for_each_store_and_number_of_workers(found: Found) -> None:
    table = bottlenecks(found)
    rate = WORKLOAD.peak_calls_s
    # 250 calls/s fill a worker, and 400 the writer.
    assert cells(table, "SQLite", "1")[2:] == [
        "**the proxy's CPU**",
        f"{rate / 250:.1%}",
        "250",
        f"{250 / rate:.1f} times",
    ]
    assert cells(table, "SQLite", "2")[2:] == [
        "**the store's writer**",
        f"{rate / 400:.1%}",
        "400",
        f"{400 / rate:.1f} times",
    ]
    assert cells(table, "PostgreSQL", "8")[2] == "**the proxy's CPU**"


def test_longer_outputs_take_what_was_measured_for_them(found: Found) -> None:
    before = needs_of(found, 100_000, SMALL_MODEL)
    measured = found.variants[LONGER_OUTPUTS, 2.0]
    after = needs_of(found, 100_000, SMALL_MODEL, measured=measured)
    assert after.proxies == pytest.approx(1.5 * before.proxies, abs=1)
    table = sensitivity_table(found)
    assert cells(table, "tokens of a tool's output", "times 2")[3] != cells(table, "as assumed")[3]
    slow = cells(table, "seconds of a tool", "times 2")
    assert float(slow[2]) < float(cells(table, "as assumed")[2])


def test_the_page_names_every_assumption_and_every_hour(found: Found) -> None:
    failed = replace(found.databases[0].day, failed=Counter({"status 503: busy": 2}))
    sqlite = replace(found.databases[0], day=failed)
    with_failures = replace(found, databases=(sqlite, found.databases[1]))
    text = page(with_failures, made=["today"], machine=["a machine"])
    for name in ("rollouts_a_day", "tool_s", "observation", "dialects", "reward_delay_s"):
        assert f"\n| {name} | " in text
    assert SMALL_MODEL.name in text
    assert LARGE_MODEL.name in text
    assert "2 times status 503: busy" in text
    assert "Failed: none" in text
    assert text.count("\n| 1 | 72,000 | ") == 1, "3,600 calls of one agent in 20"
    assert "Its busiest hour had 20.0 calls/s" in text
    for rollouts in ("10", "1,000", "100,000"):
        assert text.count(f"\n| {rollouts} | ") == 2
    assert text.count("\n| *all* | ") == 2


def test_agents_are_sampled_for_as_many_calls() -> None:
    expected = WORKLOAD.expected_calls
    assert sample(WORKLOAD, expected) == 1
    assert sample(WORKLOAD, 2 * expected) == 1
    assert sample(WORKLOAD, expected / 9.5) == 10
