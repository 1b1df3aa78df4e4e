"""An engine that was restarted between two calls has the weights of its start: it gets no calls."""

from __future__ import annotations

import pytest

from support.engines.raw_http_engine import RawHttpEngine
from support.proxy.upstream_pool import Pool, ask, until
from tracegrad.proxy.engine.upstreams import pool as pools
from tracegrad.proxy.engine.upstreams import pushed_weights
from tracegrad.proxy.engine.upstreams.pushed_weights import PushedWeights
from tracegrad.proxy.engine.weight_gate import WeightUpdateGate

URL = "http://engine"


class Engine:
    """`/weight_info` of an engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.says: str | None = "default"
        self.gate: WeightUpdateGate | None = None

        async def version(url: str) -> str | None:
            if self.gate is not None:  # a push begins while it is asked
                await self.gate.hold(ttl_s=60, drain_s=0)
            return self.says

        monkeypatch.setattr(pushed_weights, "weight_version", version)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


async def test_a_restart_between_two_calls_is_found(engine: Engine) -> None:
    gate = WeightUpdateGate()
    weights = PushedWeights(gate)
    assert not await weights.were_replaced(URL)  # nothing is pushed
    await pushed(gate, engine, 1)
    assert not await weights.were_replaced(URL)
    engine.says = "default"
    assert await weights.were_replaced(URL)
    assert not await weights.are_current(URL)
    await pushed(gate, engine, 2)
    assert not await weights.were_replaced(URL)
    assert await weights.are_current(URL)


async def test_a_push_under_way_is_no_restart(engine: Engine) -> None:
    gate = WeightUpdateGate()
    weights = PushedWeights(gate)
    await pushed(gate, engine, 1)
    assert not await weights.were_replaced(URL)
    engine.gate, engine.says = gate, "2"  # it has the new weights, and the proxy hears of it later
    assert not await weights.were_replaced(URL)
    assert not await weights.were_replaced(URL)


@pytest.mark.parametrize("says", [None, "default"])
async def test_an_engine_that_never_speaks_of_our_versions_stays(
    engine: Engine, says: str | None
) -> None:
    gate = WeightUpdateGate()
    weights = PushedWeights(gate)
    await pushed(gate, engine, 1)
    engine.says = says  # whoever pushes tells the proxy alone
    assert not await weights.were_replaced(URL)


async def test_it_gets_no_calls_until_it_is_asked_again(
    engines: list[RawHttpEngine],
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pools, "WATCH_S", 0.01)
    stale = {engines[0].url}

    async def restarted(url: str) -> bool:
        return url in stale

    async def admit(url: str) -> bool:
        return url not in stale

    mine = pool(2, restarted=restarted, admit=admit)
    await until(lambda: not mine.state()["servers"][0]["up"])
    for n in range(4):
        assert (await ask(mine, f"r{n}"))[0] == 200
    assert (len(engines[0].asked), len(engines[1].asked)) == (0, 4)
    assert "was restarted, and has the weights of its start" in caplog.text
    stale.clear()  # the next push
    await until(lambda: mine.state()["servers"][0]["up"])


async def pushed(gate: WeightUpdateGate, engine: Engine, version: int) -> None:
    await gate.hold(ttl_s=60, drain_s=0)
    engine.says = str(version)
    await gate.set_version(version)
    gate.release()
