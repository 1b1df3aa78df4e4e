"""Several servers that come and go, seen from the proxy: real sockets on loopback ports."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack

import pytest

from support.plain_engine import Asked, Line, PlainEngine, answers_ok
from tracegrad.proxy.errors import ApiError, Unavailable
from tracegrad.proxy.upstreams import Queue, Timeouts, Upstreams
from tracegrad.proxy.upstreams.base import TEXT_ONLY, VLLM
from tracegrad.proxy.upstreams.replica import ENGINE_DIED

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}

Pool = Callable[..., Upstreams]


@pytest.fixture
async def engines() -> AsyncIterator[list[PlainEngine]]:
    started = [await PlainEngine().start() for _ in range(2)]
    yield started
    for engine in started:
        engine.kill()


@pytest.fixture
async def pool(engines: list[PlainEngine]) -> AsyncIterator[Pool]:
    """Makes an open pool of the first `count` engines."""
    async with AsyncExitStack() as stack:

        def make(count: int = 1, **options: object) -> Upstreams:
            made = Upstreams([e.url for e in engines[:count]], **options)  # type: ignore[arg-type]
            made.open()
            stack.push_async_callback(made.close)
            return made

        yield make


async def ask(pool: Upstreams, sticky: str | None = None, body: bytes = b"{}") -> tuple[int, bytes]:
    async with pool.request("POST", CHAT, body=body, headers=JSON, sticky=sticky) as answer:
        return answer.status, await answer.read()


async def until(check: Callable[[], object], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Held:
    """Answers nothing before `go` is set, and then its name."""

    def __init__(self, name: bytes = b"held") -> None:
        self.go = asyncio.Event()
        self._name = name

    async def __call__(self, asked: Asked, line: Line) -> None:
        await self.go.wait()
        await line.say(self._name)


# One server


async def test_request_and_answer_go_through_as_they_are(
    engines: list[PlainEngine], pool: Pool
) -> None:
    async def behave(asked: Asked, line: Line) -> None:
        await line.say(b'{"detail":"no"}', 418, {"content-type": "application/json", "x-own": "1"})

    engines[0].behave = behave
    headers = {**JSON, "authorization": "Bearer agent"}
    async with pool().request("POST", CHAT, body=b'{"n":1}', headers=headers) as answer:
        assert answer.status == 418
        assert answer.headers["x-own"] == "1"
        assert await answer.read() == b'{"detail":"no"}'
    [asked] = engines[0].asked
    assert (asked.method, asked.path, asked.body) == ("POST", CHAT, b'{"n":1}')
    assert asked.headers["authorization"] == "Bearer agent"


async def test_one_clients_cookies_are_not_sent_with_anothers_call(
    engines: list[PlainEngine],
) -> None:
    async def behave(asked: Asked, line: Line) -> None:
        await line.say(headers={"set-cookie": "session=of-the-first; Path=/"})

    engines[0].behave = behave
    pool = Upstreams([engines[0].url.replace("127.0.0.1", "localhost")])
    pool.open()
    await ask(pool)
    await ask(pool)
    await pool.close()
    assert [asked.headers.get("cookie") for asked in engines[0].asked] == [None, None]


async def test_the_pools_own_key_takes_the_place_of_the_clients(
    engines: list[PlainEngine], pool: Pool
) -> None:
    headers = {**JSON, "authorization": "Bearer agent"}
    own = pool(api_key="engine-key")
    async with own.request("GET", "/version", body=None, headers=headers) as answer:
        assert answer.status == 200
    assert engines[0].asked[0].headers["authorization"] == "Bearer engine-key"


async def test_a_stream_is_passed_on_piece_by_piece(engines: list[PlainEngine], pool: Pool) -> None:
    taken = asyncio.Event()

    async def behave(asked: Asked, line: Line) -> None:
        await line.begin()
        await line.piece(b"one")
        await taken.wait()
        await line.piece(b"two")
        await line.end()

    engines[0].behave = behave
    seen = []
    async with pool().request("POST", CHAT, body=b"{}", headers=JSON) as answer:
        async for data in answer.content.iter_any():
            seen.append(data)
            taken.set()
    assert seen == [b"one", b"two"]


async def test_who_leaves_early_hangs_up(engines: list[PlainEngine], pool: Pool) -> None:
    async def behave(asked: Asked, line: Line) -> None:
        await line.begin()
        await line.piece(b"one")
        await asyncio.Event().wait()

    engines[0].behave = behave
    mine = pool()
    async with mine.request("POST", CHAT, body=b"{}", headers=JSON) as answer:
        assert await anext(aiter(answer.iter_any())) == b"one"
        assert mine.state()["servers"] == [{"url": engines[0].url, "up": True, "in_flight": 1}]
    await until(lambda: engines[0].open == 0)
    before_an_answer = asyncio.create_task(ask(mine))
    await until(lambda: len(engines[0].asked) == 2)
    before_an_answer.cancel()
    await until(lambda: engines[0].open == 0)
    assert mine.state()["servers"] == [{"url": engines[0].url, "up": True, "in_flight": 0}]


async def test_a_pooled_connection_that_the_server_closed_meanwhile_is_no_error(
    engines: list[PlainEngine], pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    async def behave(asked: Asked, line: Line) -> None:
        if len(engines[0].asked) % 2 == 0:  # a second call over a connection gets a hang-up
            line.hang_up()
        else:
            await line.say()

    engines[0].behave = behave
    mine = pool()
    for _ in range(6):
        assert await ask(mine) == (200, b"{}")
    assert len(engines[0].asked) == 11
    assert engines[0].looks == []
    assert caplog.records == []


async def test_redirects_are_not_followed(engines: list[PlainEngine], pool: Pool) -> None:
    async def behave(asked: Asked, line: Line) -> None:
        await line.say(b"", 307, {"location": engines[1].url + CHAT})

    engines[0].behave = behave
    assert await ask(pool(api_key="secret")) == (307, b"")
    assert engines[1].asked == []


def test_capabilities_are_those_of_the_kind_of_server() -> None:
    assert Upstreams(["http://a"]).capabilities == VLLM
    assert Upstreams(["http://a"], kind="openai").capabilities == TEXT_ONLY
    with pytest.raises(ValueError, match="upstream: no URL"):
        Upstreams([])


# Time limits


async def test_a_server_that_is_silent_is_a_504(engines: list[PlainEngine], pool: Pool) -> None:
    held = engines[0].behave = Held()
    mine = pool(timeouts=Timeouts(read_s=0.1))
    with pytest.raises(ApiError, match=r"sent nothing for 0\.1 s") as caught:
        await ask(mine)
    assert (caught.value.status, caught.value.code) == (504, "upstream_timeout")
    await until(lambda: engines[0].open <= 1)  # one for the look at its health
    await until(lambda: len(engines[0].looks) == 1)
    held.go.set()
    assert await ask(mine) == (200, b"held")


async def test_a_stream_that_falls_silent_is_a_504(engines: list[PlainEngine], pool: Pool) -> None:
    async def behave(asked: Asked, line: Line) -> None:
        await line.begin()
        for _ in range(6):  # longer than the limit altogether
            await line.piece(b"one")
            await asyncio.sleep(0.06)
        await asyncio.Event().wait()

    engines[0].behave = behave
    mine = pool(timeouts=Timeouts(read_s=0.3))
    async with mine.request("POST", CHAT, body=b"{}", headers=JSON) as answer:
        stream = answer.iter_any()
        assert b"".join([await anext(stream) for _ in range(6)]) == b"one" * 6
        with pytest.raises(ApiError, match="sent nothing for") as caught:
            await anext(stream)
    assert caught.value.status == 504
    await until(lambda: engines[0].open == 0)


async def test_a_server_that_does_not_accept_is_as_good_as_dead() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as stack:
        host, port = listener.getsockname()
        for _ in range(3):  # nobody accepts them, and there is no room for more
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, port))
        timeouts = Timeouts(connect_s=0.1)
        pool = Upstreams([f"http://{host}:{port}"], timeouts=timeouts, queue=Queue(max_wait_s=0))
        pool.open()
        with pytest.raises(Unavailable, match="Connection timeout"):
            await ask(pool)
        await pool.close()


async def test_a_server_of_another_protocol_is_a_502(
    engines: list[PlainEngine], pool: Pool
) -> None:
    async def behave(asked: Asked, line: Line) -> None:
        line._writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")

    engines[0].behave = behave
    with pytest.raises(ApiError, match="does not speak HTTP") as caught:
        await ask(pool())
    assert caught.value.status == 502


# Several servers


async def test_rollouts_stick_and_calls_without_a_name_are_spread(
    engines: list[PlainEngine], pool: Pool
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
    engines: list[PlainEngine], pool: Pool, politely: bool
) -> None:
    go = asyncio.Event()

    async def behave(asked: Asked, line: Line) -> None:
        kind = asked.json["kind"]
        if kind == "whole":
            await go.wait()
            await line.say(asked.body)
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


def _is_begun_at(engine: PlainEngine, number: int) -> bool:
    return any(
        asked.json["n"] == number and asked.json["kind"] == "begun" for asked in engine.asked
    )


async def test_a_server_that_comes_back_gets_calls_again(
    engines: list[PlainEngine], pool: Pool, caplog: pytest.LogCaptureFixture
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
    lines = [record.getMessage() for record in caplog.records]
    assert "gets no calls" in lines[0]
    assert "Connect call failed" in lines[0]
    assert f"{engines[0].url} is back after" in lines[1]


async def test_a_server_that_is_alive_but_not_well_gets_no_calls(
    engines: list[PlainEngine], pool: Pool
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
    engines: list[PlainEngine], pool: Pool
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
    engines: list[PlainEngine], pool: Pool
) -> None:
    """vLLM's server outlives its engine for a moment, and says so: before a stream or in it."""
    said = b'{"error":{"message":"%b. See stack trace","code":500}}' % ENGINE_DIED

    async def before(asked: Asked, line: Line) -> None:
        await line.say(said, 500)

    async def inside(asked: Asked, line: Line) -> None:
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


async def test_any_other_500_is_relayed(engines: list[PlainEngine], pool: Pool) -> None:
    async def behave(asked: Asked, line: Line) -> None:
        await line.say(b'{"error":{"message":"bad luck"}}', 500)

    engines[0].behave = behave
    mine = pool(2)
    assert await ask(mine, "r1") == (500, b'{"error":{"message":"bad luck"}}')
    assert engines[1].asked == []
    assert mine.state()["servers"][0]["up"] is True


async def test_a_server_that_hangs_up_on_every_call_is_left(
    engines: list[PlainEngine], pool: Pool
) -> None:
    async def behave(asked: Asked, line: Line) -> None:
        line.hang_up()

    engines[0].behave = behave
    mine = pool(2)
    assert (await ask(mine, "r1"))[0] == 200
    assert len(engines[0].asked) == 2, "the first may have been a pooled connection's fault"


async def test_a_call_that_servers_die_of_does_not_take_them_all(
    engines: list[PlainEngine], pool: Pool
) -> None:
    async def behave(asked: Asked, line: Line) -> None:
        if asked.body == b"poison":
            line.break_off()
        else:
            await line.say()

    engines[0].behave = engines[1].behave = behave
    mine = pool(2)
    with pytest.raises(ApiError, match="3 times an engine took this call") as caught:
        await ask(mine, "r1", b"poison")
    assert caught.value.status == 502
    assert len(engines[0].asked + engines[1].asked) == 3
    assert (await ask(mine, "r2"))[0] == 200


# Nobody else to go to


async def test_calls_wait_until_the_server_is_back(engines: list[PlainEngine], pool: Pool) -> None:
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
    engines: list[PlainEngine], pool: Pool
) -> None:
    engines[0].kill()
    call = asyncio.create_task(ask(pool()))
    await asyncio.sleep(0.05)
    assert not call.done()
    await engines[0].start()
    assert (await call)[0] == 200


async def test_one_rollouts_crowd_does_not_go_before_the_others(
    engines: list[PlainEngine], pool: Pool
) -> None:
    mine = pool(queue=Queue(max_waiting=60))
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


async def test_a_wait_has_an_end(engines: list[PlainEngine], pool: Pool) -> None:
    mine = pool(2, queue=Queue(max_wait_s=0.15))
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
    engines: list[PlainEngine], pool: Pool
) -> None:
    restarts: list[asyncio.Task[PlainEngine]] = []

    async def restart() -> PlainEngine:
        await asyncio.sleep(0.01)
        return await engines[0].start()

    async def looks_well_and_dies(url: str) -> bool:
        engines[0].kill()
        restarts.append(asyncio.create_task(restart()))
        return True

    mine = pool(queue=Queue(max_wait_s=0.5), admit=looks_well_and_dies)
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
    engines: list[PlainEngine], pool: Pool
) -> None:
    mine = pool(queue=Queue(max_wait_s=0))
    engines[0].kill()
    with pytest.raises(Unavailable, match="does not answer"):
        await ask(mine)


async def test_the_list_of_models_is_there_or_not_at_once(
    engines: list[PlainEngine], pool: Pool
) -> None:
    mine = pool(api_key="k")
    assert await mine.models() == b"{}"
    assert engines[0].looks[0].headers["authorization"] == "Bearer k"
    engines[0].kill()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(mine.models(), 2)
    assert mine.state()["servers"][0]["in_flight"] == 0


async def test_who_hangs_up_while_waiting_leaves_the_line(
    engines: list[PlainEngine], pool: Pool
) -> None:
    mine = pool()
    engines[0].kill()
    call = asyncio.create_task(ask(mine))
    await until(lambda: mine.state()["waiting"] == 1)
    call.cancel()
    await until(lambda: mine.state()["waiting"] == 0)


async def test_a_server_with_the_weights_of_its_start_may_be_kept_out(
    engines: list[PlainEngine], pool: Pool, caplog: pytest.LogCaptureFixture
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
    assert "cannot be told" in caplog.text


async def test_closing_ends_the_looks_and_the_connections(engines: list[PlainEngine]) -> None:
    def looking() -> list[str]:
        running = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
        return [name for name in running if name.startswith("Replica.")]

    pool = Upstreams([engine.url for engine in engines])
    pool.open()
    engines[0].kill()
    assert (await ask(pool))[0] == 200
    assert len(looking()) == 1
    await pool.close()
    assert looking() == []
    await until(lambda: engines[1].open == 0)
