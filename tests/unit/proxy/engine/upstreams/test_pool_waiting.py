"""No server is up: calls wait for one, in a fair line, and not for ever."""

from __future__ import annotations

import asyncio

import pytest

from support.engines.raw_http_engine import RawHttpEngine, answers_ok
from support.proxy.upstream_pool import Held, Pool, ask, until
from tracegrad.proxy.engine.upstreams import QueueLimits
from tracegrad.proxy.http.errors import Unavailable


async def test_calls_wait_until_the_server_is_back(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    mine = pool()
    assert (await ask(mine))[0] == 200
    held = engines[0].behave = Held()
    calls = [asyncio.create_task(ask(mine, f"r{n}")) for n in range(50)]
    await until(lambda: len(engines[0].asked) == 51)
    engines[0].kill()
    await until(lambda: mine.state()["waiting"] == 50)
    later = asyncio.create_task(ask(mine, "later"))
    await until(lambda: mine.state()["waiting"] == 51)
    engines[0].behave = answers_ok
    await engines[0].start()
    assert await asyncio.gather(*calls, later) == [(200, b'{"ok":true}')] * 51
    assert mine.state()["waiting"] == 0
    held.go.set()


async def test_a_proxy_may_be_there_before_its_server(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    engines[0].kill()
    call = asyncio.create_task(ask(pool()))
    await asyncio.sleep(0.05)
    assert not call.done()
    await engines[0].start()
    assert (await call)[0] == 200


async def test_one_rollouts_crowd_does_not_go_before_the_others(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    mine = pool(queue=QueueLimits(max_waiting=60))
    engines[0].kill()
    crowd = [asyncio.create_task(ask(mine, "crowd", b"crowd")) for _ in range(100)]
    await until(lambda: sum(call.done() for call in crowd) == 40)
    few = [asyncio.create_task(ask(mine, f"r{n}", b"few")) for n in range(10)]
    await until(lambda: sum(call.done() for call in crowd) == 50)
    assert mine.state()["waiting"] == 60
    await engines[0].start()
    assert [status for status, _ in await asyncio.gather(*few)] == [200] * 10
    results = await asyncio.gather(*crowd, return_exceptions=True)
    refused = [result for result in results if isinstance(result, Unavailable)]
    assert len(refused) == 50
    assert results.count((200, b'{"ok":true}')) == 50
    assert refused[0].status == 503
    assert "60 calls wait for it already" in refused[0].message
    order = [asked.body for asked in engines[0].asked]
    assert len(order) == 60
    # Connections are made side by side, so the server sees them in roughly this order.
    assert max(n for n, body in enumerate(order) if body == b"few") < 20


async def test_a_wait_has_an_end(engines: list[RawHttpEngine], pool: Pool) -> None:
    mine = pool(2, queue=QueueLimits(max_wait_s=0.15))
    for engine in engines:
        engine.kill()
    started = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable) as caught:
        await ask(mine)
    assert 0.15 <= asyncio.get_running_loop().time() - started < 5
    assert caught.value.code == "upstream_unreachable"
    for engine in engines:
        assert f"{engine.url} does not answer: Cannot connect" in caught.value.message
    assert caught.value.response().headers["retry-after"] == "1"


async def test_a_server_that_keeps_going_away_does_not_prolong_the_wait(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    restarts: list[asyncio.Task[RawHttpEngine]] = []

    async def restart() -> RawHttpEngine:
        await asyncio.sleep(0.01)
        return await engines[0].start()

    async def looks_well_and_dies(url: str) -> bool:
        engines[0].kill()
        restarts.append(asyncio.create_task(restart()))
        return True

    mine = pool(queue=QueueLimits(max_wait_s=0.5), admit=looks_well_and_dies)
    engines[0].kill()
    restarts.append(asyncio.create_task(restart()))
    started = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable, match="does not answer"):
        await ask(mine)
    assert asyncio.get_running_loop().time() - started < 5
    assert len(restarts) > 2
    assert engines[0].asked == []
    await mine.close()
    await asyncio.gather(*restarts)


async def test_no_call_waits_where_waiting_is_switched_off(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    mine = pool(queue=QueueLimits(max_wait_s=0))
    engines[0].kill()
    with pytest.raises(Unavailable, match="does not answer"):
        await ask(mine)


async def test_the_list_of_models_is_there_or_not_at_once(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    mine = pool(api_key="k")
    assert await mine.models() == b"{}"
    assert engines[0].looks[0].headers["authorization"] == "Bearer k"
    engines[0].kill()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(mine.models(), 2)
    assert mine.state()["servers"][0]["in_flight"] == 0


async def test_who_hangs_up_while_waiting_leaves_the_line(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    mine = pool()
    engines[0].kill()
    call = asyncio.create_task(ask(mine))
    await until(lambda: mine.state()["waiting"] == 1)
    call.cancel()
    await until(lambda: mine.state()["waiting"] == 0)


async def test_a_server_with_the_weights_of_its_start_may_be_kept_out(
    engines: list[RawHttpEngine], pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[bool | Exception] = [False, RuntimeError("no idea"), True]
    asked_of: list[str] = []

    async def admit(url: str) -> bool:
        asked_of.append(url)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    mine = pool(admit=admit)
    assert (await ask(mine))[0] == 200
    assert asked_of == []
    engines[0].kill()
    call = asyncio.create_task(ask(mine))
    await until(lambda: mine.state()["waiting"] == 1)
    await engines[0].start()
    assert (await call)[0] == 200
    assert asked_of == [engines[0].url] * 3
    assert "may have calls again is unknown" in caplog.text
