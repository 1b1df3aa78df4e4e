"""The utilization law, and what rollouts need by it, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.scale.day import Done, Span, Used
from bench.scale.demands import Demands, Deployment, Part, bottleneck, parts, scaled
from bench.scale.needs import Assumptions, calls_a_second, changed, needs
from bench.scale.workload import EngineRates, Length, Workload

DEMANDS = Demands(
    proxy_s=0.005,
    writer_s=0.002,
    writer_cpu_s=0.001,
    writer_delay_s=0.0005,
    database_s=0.004,
    engine_s=0.1,
    commits=0.5,
    posts=0.25,
    events=1.5,
    store_bytes=10_000,
    network_bytes=125_000,
)
# Each call takes a second of the engine: 100 new tokens in 0.1 s, 90 sampled ones in 0.9 s.
ENGINE = EngineRates("e", prefill=1_000, decode=100, sequences=10)


def fixed(tokens: int) -> Length:
    return Length(tokens, 1e-6, most=10 * tokens)


ONE_TURN = Workload(
    turns=1.0, instructions=50, task=fixed(50), completion=fixed(90), observation=fixed(100)
)


def span(calls: float, used: float, begin: float = 0.0) -> Span:
    done = Done(calls=calls, posts=2, engine_s=3 * used, agent_bytes=1_000)
    taken = Used(used, 2 * used, used, used / 2, 7, 9, calls, 4 * used, 500, 3_000)
    return Span(begin, begin + 3_600, done, taken, 1 << 20)


def test_demands_are_seconds_of_the_peak_and_bytes_of_the_day() -> None:
    found = Demands.of(span(10, 0.1), span(100, 7.0))
    assert (found.proxy_s, found.writer_s, found.database_s) == pytest.approx((0.01, 0.02, 0.04))
    assert (found.engine_s, found.commits, found.events) == pytest.approx((0.03, 0.7, 0.9))
    assert (found.posts, found.store_bytes, found.network_bytes) == pytest.approx((0.2, 5.0, 40.0))
    with pytest.raises(ValueError, match="no call"):
        Demands.of(span(0, 0.1), span(100, 7.0))


def test_a_part_is_full_where_its_servers_are_always_busy() -> None:
    part = Part("p", demand=0.005, servers=2)
    assert part.utilization(100) == pytest.approx(0.25)
    assert part.most_calls_s == pytest.approx(400)
    assert part.utilization(part.most_calls_s) == pytest.approx(1.0)
    assert Part("nothing", 0.0).most_calls_s == float("inf")


def test_the_bottleneck_moves_with_the_workers() -> None:
    """200 calls/s fill one worker; a SQLite file has one writer, which 500 fill; a database server
    of four cores is full at 1,000."""

    def first(workers: int, *, server: bool) -> tuple[str, float]:
        part = bottleneck(parts(DEMANDS, Deployment(workers), database_server=server))
        return part.name, round(part.most_calls_s)

    assert first(1, server=False) == ("the proxy's CPU", 200)
    assert first(2, server=False) == ("the proxy's CPU", 400)
    assert first(4, server=False) == ("the store's writer", 500)
    assert first(4, server=True) == ("the proxy's CPU", 800)
    assert first(8, server=True) == ("the database server's CPU", 1_000)
    slow = replace(DEMANDS, network_bytes=12.5e6)
    found = bottleneck(parts(slow, Deployment(8), database_server=True))
    assert found.name == "the network of the proxy's host"
    assert found.most_calls_s == pytest.approx(100)


def test_demands_are_scaled_by_what_was_measured_alike() -> None:
    other = replace(DEMANDS, proxy_s=0.010, writer_s=0.003, store_bytes=20_000)
    found = scaled(replace(DEMANDS, proxy_s=0.004, database_s=0.7), other, DEMANDS)
    assert found.proxy_s == pytest.approx(0.008)
    assert found.writer_s == pytest.approx(0.003)
    assert (found.store_bytes, found.network_bytes) == pytest.approx((20_000, 125_000))
    assert found.database_s == 0.7, "was not measured for others"


def test_calls_follow_from_how_long_a_rollout_takes() -> None:
    assert calls_a_second(10, ONE_TURN, ENGINE) == pytest.approx(10.0)
    two = replace(ONE_TURN, turns=1e9, most_turns=2, tool_s=6.0)
    # Two calls in 1 + 6 + 1 seconds.
    assert calls_a_second(8, two, ENGINE) == pytest.approx(2.0, rel=1e-6)


def test_needs_by_hand() -> None:
    found = needs(
        1_000,
        ONE_TURN,
        ENGINE,
        sqlite=DEMANDS,
        server=replace(DEMANDS, writer_s=9.0),
        text_share=0.25,
        assumed=Assumptions(),
    )
    assert found.calls_s == pytest.approx(1_000)
    assert found.proxies == 9, "5 busy, at 60 %"
    assert found.writes_s == pytest.approx(1_500)
    assert found.commits_s == pytest.approx(1_250)
    assert found.writer == pytest.approx(2.0), "too much for one"
    assert found.database_cores == pytest.approx(4 / 0.6)
    assert found.gb_a_day == pytest.approx(864)
    assert found.gb_kept == pytest.approx(864 * (0.25 * 7 + 0.75 * 90))
    # 0.1 s of prefill and 0.9 s in one of ten places: 190 busy, at 80 %.
    assert found.engines == 238
    assert found.network_gbit_s == pytest.approx(1.0)


def test_few_rollouts_need_one_of_each() -> None:
    found = needs(
        1, ONE_TURN, ENGINE, sqlite=DEMANDS, server=DEMANDS, text_share=0, assumed=Assumptions()
    )
    assert (found.proxies, found.engines) == (1, 1)


def test_one_assumption_is_changed_at_a_time() -> None:
    found = changed(ONE_TURN)
    assert len(found) == 6
    for other in found.values():
        names = ("completion", "tool_s", "observation")
        assert sum(getattr(other, name) != getattr(ONE_TURN, name) for name in names) == 1
    assert found["seconds of a tool", 2.0].tool_s == 16.0
