"""One server seen from the proxy: calls and answers go through as they are. Real sockets."""

from __future__ import annotations

import asyncio

import pytest

from support.engines.raw_http_engine import RawHttpEngine, ReceivedRequest, ServerConnection
from support.proxy.upstream_pool import CHAT, JSON, Pool, ask, until
from tracegrad.proxy.engine.upstreams import UpstreamPool
from tracegrad.proxy.engine.upstreams.base import TEXT_ONLY, VLLM
from tracegrad.proxy.http.errors import ApiError


async def test_request_and_answer_go_through_as_they_are(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.answer(
            b'{"detail":"no"}', 418, {"content-type": "application/json", "x-own": "1"}
        )

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
    engines: list[RawHttpEngine],
) -> None:
    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.answer(headers={"set-cookie": "session=of-the-first; Path=/"})

    engines[0].behave = behave
    pool = UpstreamPool([engines[0].url.replace("127.0.0.1", "localhost")])
    pool.open()
    await ask(pool)
    await ask(pool)
    await pool.close()
    assert [asked.headers.get("cookie") for asked in engines[0].asked] == [None, None]


async def test_the_pools_own_key_takes_the_place_of_the_clients(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    headers = {**JSON, "authorization": "Bearer agent"}
    own = pool(api_key="engine-key")
    async with own.request("GET", "/version", body=None, headers=headers) as answer:
        assert answer.status == 200
    assert engines[0].asked[0].headers["authorization"] == "Bearer engine-key"


async def test_a_stream_is_passed_on_piece_by_piece(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    taken = asyncio.Event()

    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
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


async def test_a_stream_is_delivered_piece_by_piece(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    """And the connection serves the next call: it is as it was."""
    taken: asyncio.Queue[bytes] = asyncio.Queue()

    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.begin()
        for piece in (b"one", b"two", b"three"):
            await line.piece(piece)
            assert await taken.get() == piece
        await line.end()

    async def never() -> None:
        raise AssertionError("nobody is behind")

    engines[0].behave = behave
    mine = pool()
    for _ in range(3):
        async with mine.request("POST", CHAT, body=b"{}", headers=JSON) as answer:
            await answer.deliver(lambda data: taken.put_nowait(data) is not None, never)
    assert engines[0].open == 1


async def test_bytes_of_the_wire_are_offered_first_and_what_is_not_taken_is_decoded(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    """A piece in two parts is not taken; the next whole one is, and the connection stays good."""
    taken: asyncio.Queue[bytes] = asyncio.Queue()
    offered: list[bytes] = []

    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.begin()
        for part in (b"one", b"two", b"three"):
            await line.piece(part)
            assert await taken.get() == part
        await line.end()

    def frames(data: bytes) -> bool | None:
        offered.append(data)
        if data != b"3\r\ntwo\r\n":
            return None
        taken.put_nowait(b"two")
        return False

    async def never() -> None:
        raise AssertionError("nobody is behind")

    engines[0].behave = behave
    mine = pool()
    for _ in range(2):
        offered.clear()
        async with mine.request("POST", CHAT, body=b"{}", headers=JSON) as answer:
            await answer.deliver(lambda data: taken.put_nowait(data) is not None, never, frames)
        assert offered[:2] == [b"3\r\ntwo\r\n", b"5\r\nthree\r\n"]
    assert engines[0].open == 1


async def test_what_takes_bytes_of_the_wire_may_be_behind_or_fail(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    drained: list[int] = []
    seen: list[bytes] = []

    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.begin()
        for number in range(5):
            await line.piece(b"%d" % number)
            await asyncio.sleep(0.01)
        await asyncio.Event().wait()

    def frames(data: bytes) -> bool | None:
        seen.append(data)
        if len(seen) == 3:
            raise ApiError(502, "enough", kind="test")
        return True

    async def drain() -> None:
        drained.append(len(seen))

    engines[0].behave = behave
    with pytest.raises(ApiError, match="enough"):
        async with pool().request("POST", CHAT, body=b"{}", headers=JSON) as answer:
            await answer.deliver(lambda _: False, drain, frames)
    await until(lambda: engines[0].open == 0)
    assert drained == [1, 2]


async def test_who_is_behind_gets_nothing_until_it_has_caught_up(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    said = [b"%d," % number for number in range(40)]
    seen: list[bytes] = []
    behind = False

    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.begin()
        for piece in said:
            await line.piece(piece)
            await asyncio.sleep(0)
        await line.end()

    def consume(data: bytes) -> bool:
        nonlocal behind
        assert not behind
        seen.append(data)
        behind = len(seen) % 3 != 0
        return behind

    async def drained() -> None:
        nonlocal behind
        await asyncio.sleep(0.002)
        behind = False

    engines[0].behave = behave
    async with pool().request("POST", CHAT, body=b"{}", headers=JSON) as answer:
        await answer.deliver(consume, drained)
    assert b"".join(seen) == b"".join(said)


async def test_what_a_consumer_raises_ends_the_delivery(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    seen: list[bytes] = []

    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.begin()
        for number in range(5):
            await line.piece(b"%d" % number)
            await asyncio.sleep(0.01)
        await asyncio.Event().wait()

    def consume(data: bytes) -> bool:
        seen.append(data)
        if len(seen) == 3:
            raise ApiError(502, "enough", kind="test")
        return False

    engines[0].behave = behave
    with pytest.raises(ApiError, match="enough"):
        async with pool().request("POST", CHAT, body=b"{}", headers=JSON) as answer:
            await answer.deliver(consume, asyncio.Event().wait)  # type: ignore[arg-type]
    await until(lambda: engines[0].open == 0)
    assert len(seen) == 3


async def test_who_leaves_a_delivery_hangs_up(engines: list[RawHttpEngine], pool: Pool) -> None:
    begun = asyncio.Event()

    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.begin()
        await line.piece(b"one")
        await asyncio.Event().wait()

    async def deliver() -> None:
        async with mine.request("POST", CHAT, body=b"{}", headers=JSON) as answer:
            await answer.deliver(lambda _: begun.set() is not None, begun.wait)  # type: ignore[arg-type]

    engines[0].behave = behave
    mine = pool()
    task = asyncio.create_task(deliver())
    await begun.wait()
    task.cancel()
    await until(lambda: engines[0].open == 0)
    assert mine.state()["servers"] == [{"url": engines[0].url, "up": True, "in_flight": 0}]


@pytest.mark.parametrize("ends", ["close", "reset"])
async def test_a_delivery_that_breaks_off_is_a_502(
    engines: list[RawHttpEngine], pool: Pool, ends: str
) -> None:
    seen: list[bytes] = []

    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.begin()
        await line.piece(b"0")
        await until(lambda: bool(seen))
        await line.piece(b"12")
        await until(lambda: len(seen) > 1)
        getattr(line, ends)()

    engines[0].behave = behave
    with pytest.raises(ApiError, match="broke off its answer") as caught:
        async with pool().request("POST", CHAT, body=b"{}", headers=JSON) as answer:
            await answer.deliver(lambda data: seen.append(data) is not None, asyncio.Event().wait)  # type: ignore[arg-type]
    assert caught.value.status == 502
    assert b"".join(seen) == b"012"


@pytest.mark.parametrize("after", ["head", "piece"])
@pytest.mark.parametrize("how", ["pushed", "pulled"])
async def test_bytes_that_are_no_http_break_an_answer_off(
    engines: list[RawHttpEngine], pool: Pool, how: str, after: str
) -> None:
    """At once: aiohttp hangs up over them, and leaves who reads the body waiting."""
    seen: list[bytes] = []

    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.begin()
        await asyncio.sleep(0.02)  # the head is read alone
        if after == "piece":
            await line.piece(b"one")
            await until(lambda: seen)
        await line.raw(b"no length\r\nof a chunk")
        await asyncio.Event().wait()

    async def read(mine: UpstreamPool) -> None:
        async with mine.request("POST", CHAT, body=b"{}", headers=JSON) as answer:
            if how == "pushed":
                await answer.deliver(lambda data: seen.append(data) is not None, never)  # type: ignore[func-returns-value]
            else:
                async for data in answer.iter_any():
                    seen.append(data)

    async def never() -> None:
        raise AssertionError("nobody is behind")

    engines[0].behave = behave
    async with asyncio.timeout(60):  # the longest silence is ten minutes
        with pytest.raises(ApiError, match=r"broke off its answer|gave no answer") as caught:
            await read(pool())
    assert caught.value.status == 502
    assert seen == ([b"one"] if after == "piece" else [])


async def test_who_leaves_early_hangs_up(engines: list[RawHttpEngine], pool: Pool) -> None:
    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
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
    engines: list[RawHttpEngine], pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        if len(engines[0].asked) % 2 == 0:  # a second call over a connection gets a hang-up
            line.close()
        else:
            await line.answer()

    engines[0].behave = behave
    mine = pool()
    for _ in range(6):
        assert await ask(mine) == (200, b"{}")
    assert len(engines[0].asked) == 11
    assert engines[0].looks == []
    assert caplog.records == []


async def test_redirects_are_not_followed(engines: list[RawHttpEngine], pool: Pool) -> None:
    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.answer(b"", 307, {"location": engines[1].url + CHAT})

    engines[0].behave = behave
    assert await ask(pool(api_key="secret")) == (307, b"")
    assert engines[1].asked == []


def test_capabilities_are_those_of_the_kind_of_server() -> None:
    assert UpstreamPool(["http://a"]).capabilities == VLLM
    assert UpstreamPool(["http://a"], kind="openai").capabilities == TEXT_ONLY
    with pytest.raises(ValueError, match="upstream: no URL"):
        UpstreamPool([])
