"""Several servers that come and go: who gets the calls, and what is lost when one dies."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from support.engines.raw_http_engine import RawHttpEngine, ReceivedRequest, ServerConnection
from support.proxy.upstream_pool import CHAT, JSON, Held, Pool, ask, until
from support.system.log_lines import our_lines
from tracegrad.proxy.engine.upstreams import UpstreamPool
from tracegrad.proxy.http.errors import ENGINE_DIED, ApiError


async def test_rollouts_stick_and_calls_without_a_name_are_spread(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    mine = pool(2)
    for _ in range(3):
        for rollout in range(10):
            await ask(mine, f"r{rollout}", body=b"%d" % rollout)
    where = [Counter(asked.body for asked in engine.asked) for engine in engines]
    assert [len(rollouts) for rollouts in where] == [5, 5]
    assert where[0].keys() & where[1].keys() == set()
    assert set((where[0] + where[1]).values()) == {3}
    held = engines[0].behave = engines[1].behave = Held()
    before = [len(engine.asked) for engine in engines]
    calls = [asyncio.create_task(ask(mine)) for _ in range(20)]
    await until(lambda: sum(len(engine.asked) for engine in engines) == sum(before) + 20)
    assert [len(e.asked) - n for e, n in zip(engines, before, strict=True)] == [10, 10]
    held.go.set()
    assert await asyncio.gather(*calls) == [(200, b"held")] * 20


@pytest.mark.parametrize("politely", [False, True])
async def test_a_server_dies_under_load_and_only_answers_that_had_begun_are_lost(
    engines: list[RawHttpEngine], pool: Pool, politely: bool
) -> None:
    go = asyncio.Event()

    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        kind = asked.json["kind"]
        if kind == "whole":
            await go.wait()
            await line.answer(asked.body)
            return
        await line.begin()
        if kind == "begun":
            await line.piece(b"some ")
        await go.wait()
        await line.piece(asked.body)
        await line.end()

    for engine in engines:
        engine.behave = behave
    mine = pool(2)
    begun: list[bytes] = []

    async def one(number: int) -> object:
        kind = ("whole", "stream", "begun")[number % 3]
        body = b'{"kind": "%s", "n": %d}' % (kind.encode(), number)
        try:
            async with mine.request(
                "POST", CHAT, body=body, headers=JSON, sticky=f"r{number // 2}"
            ) as answer:
                seen = b""
                async for data in answer.iter_any():
                    seen += data
                    if kind == "begun" and seen == b"some ":
                        begun.append(body)
                return seen == body if kind != "begun" else seen == b"some " + body
        except ApiError as error:
            return error

    calls = [asyncio.create_task(one(number)) for number in range(180)]
    await until(lambda: sum(len(engine.asked) for engine in engines) == 180)
    await until(lambda: len(begun) == 60)
    lost = [number for number in range(180) if _is_begun_at(engines[0], number)]
    assert len(engines[0].asked) == 90
    engines[0].kill(politely=politely)
    await until(lambda: len(engines[1].asked) == 180 - len(lost))
    go.set()
    results = await asyncio.gather(*calls)
    failed = [number for number, result in enumerate(results) if result is not True]
    assert failed == lost
    errors = [results[number] for number in lost]
    assert errors
    for error in errors:
        assert isinstance(error, ApiError)
        assert error.status == 502
        assert "broke off" in error.message
    assert [s["in_flight"] for s in mine.state()["servers"]] == [0, 0]


def _is_begun_at(engine: RawHttpEngine, number: int) -> bool:
    return any(
        asked.json["n"] == number and asked.json["kind"] == "begun" for asked in engine.asked
    )


async def test_a_server_that_comes_back_gets_calls_again(
    engines: list[RawHttpEngine], pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    mine = pool(2)
    engines[0].kill()
    caplog.set_level(logging.WARNING, "tracegrad.proxy")
    for _ in range(4):
        assert (await ask(mine))[0] == 200
    assert len(engines[1].asked) == 4
    await engines[0].start()
    await until(lambda: engines[0].looks)
    assert [look.path for look in engines[0].looks] == ["/health"]
    await until(lambda: mine.state()["servers"][0]["up"])
    engines[1].kill()
    assert (await ask(mine))[0] == 200
    assert len(engines[0].asked) == 1
    lines = our_lines(caplog)
    assert "gets no calls" in lines[0]
    assert "Connect call failed" in lines[0]
    assert f"{engines[0].url} is back after" in lines[1]


async def test_a_server_that_is_alive_but_not_well_gets_no_calls(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    mine = pool(2)
    engines[0].kill()
    await ask(mine)
    engines[0].health = 503
    await engines[0].start()
    await until(lambda: len(engines[0].looks) >= 2)
    await ask(mine)
    assert len(engines[1].asked) == 2
    assert engines[0].asked == []


async def test_other_servers_are_looked_at_by_their_models_and_with_the_key(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    mine = pool(kind="openai", api_key="k")
    engines[0].kill()
    call = asyncio.create_task(ask(mine))
    await until(lambda: mine.state()["waiting"] == 1)
    engines[0].health = 401  # somebody is there, who wants another key for that
    await engines[0].start()
    assert (await call)[0] == 200
    [look] = engines[0].looks
    assert (look.path, look.headers["authorization"]) == ("/v1/models", "Bearer k")


async def test_an_engine_that_died_under_its_server_is_left_too(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    """vLLM's server outlives its engine for a moment, and says so: before a stream or in it."""
    said = b'{"error":{"message":"%b. See stack trace","code":500}}' % ENGINE_DIED

    async def before(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.answer(said, 500)

    async def inside(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.begin()
        await line.piece(b"data: " + said + b"\n\n")
        await line.end()

    engines[0].health = 503
    for behave in (before, inside):
        mine = pool(2)
        engines[0].behave = behave
        assert await ask(mine) == (200, b'{"ok":true}')
        assert mine.state()["servers"][0]["up"] is False
    assert len(engines[0].asked) == 2


async def test_any_other_500_is_relayed(engines: list[RawHttpEngine], pool: Pool) -> None:
    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.answer(b'{"error":{"message":"bad luck"}}', 500)

    engines[0].behave = behave
    mine = pool(2)
    assert await ask(mine, "r1") == (500, b'{"error":{"message":"bad luck"}}')
    assert engines[1].asked == []
    assert mine.state()["servers"][0]["up"] is True


async def test_a_server_that_hangs_up_on_every_call_is_left(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        line.close()

    engines[0].behave = behave
    mine = pool(2)
    assert (await ask(mine, "r1"))[0] == 200
    assert len(engines[0].asked) == 2, "the first may have been a pooled connection's fault"


async def test_a_call_that_servers_die_of_does_not_take_them_all(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        if asked.body == b"poison":
            line.reset()
        else:
            await line.answer()

    engines[0].behave = engines[1].behave = behave
    mine = pool(2)
    with pytest.raises(ApiError, match="3 times an engine took this call") as caught:
        await ask(mine, "r1", b"poison")
    assert caught.value.status == 502
    assert len(engines[0].asked + engines[1].asked) == 3
    assert (await ask(mine, "r2"))[0] == 200


async def test_closing_ends_the_looks_and_the_connections(engines: list[RawHttpEngine]) -> None:
    def looking() -> list[str]:
        running = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
        return [name for name in running if name.startswith("Replica.")]

    pool = UpstreamPool([engine.url for engine in engines])
    pool.open()
    engines[0].kill()
    assert (await ask(pool))[0] == 200
    assert len(looking()) == 1
    await pool.close()
    assert looking() == []
    await until(lambda: engines[1].open == 0)


async def test_each_attempt_is_said_as_it_is_made(engines: list[RawHttpEngine], pool: Pool) -> None:
    """What was before the last one is a wait for an engine, and no work of one."""
    mine = pool(2)
    engines[0].kill()
    asked: list[str] = []
    for _ in range(2):
        async with mine.request(
            "POST", CHAT, body=b"{}", headers=JSON, on_sent=asked.append
        ) as answer:
            await answer.read()
    assert len(asked) in (2, 3), "once for each, and once more for the one that nobody took"
    assert len(engines[1].asked) == 2
