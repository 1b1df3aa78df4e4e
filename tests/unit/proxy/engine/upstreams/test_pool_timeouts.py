"""A server that is silent, does not accept or speaks no HTTP: the error, and when it comes."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import pytest

from support.engines.raw_http_engine import RawHttpEngine, ReceivedRequest, ServerConnection
from support.proxy.upstream_pool import CHAT, JSON, Held, Pool, ask, until
from tracegrad.proxy.engine.upstreams import QueueLimits, UpstreamPool, UpstreamTimeouts
from tracegrad.proxy.http.errors import ApiError, Unavailable


async def test_a_server_that_is_silent_is_a_504(engines: list[RawHttpEngine], pool: Pool) -> None:
    held = engines[0].behave = Held()
    mine = pool(timeouts=UpstreamTimeouts(read_s=0.1))
    with pytest.raises(ApiError, match=r"sent nothing for 0\.1 s") as caught:
        await ask(mine)
    assert (caught.value.status, caught.value.code) == (504, "upstream_timeout")
    await until(lambda: engines[0].open <= 1)  # one for the look at its health
    await until(lambda: len(engines[0].looks) == 1)
    held.go.set()
    assert await ask(mine) == (200, b"held")


async def test_a_stream_that_falls_silent_is_a_504(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        await line.begin()
        for _ in range(6):  # longer than the limit altogether
            await line.piece(b"one")
            await asyncio.sleep(0.06)
        await asyncio.Event().wait()

    engines[0].behave = behave
    mine = pool(timeouts=UpstreamTimeouts(read_s=0.3))
    async with mine.request("POST", CHAT, body=b"{}", headers=JSON) as answer:
        stream = answer.iter_any()
        assert b"".join([await anext(stream) for _ in range(6)]) == b"one" * 6
        with pytest.raises(ApiError, match="sent nothing for") as caught:
            await anext(stream)
    assert caught.value.status == 504
    await until(lambda: engines[0].open == 0)

    seen: list[bytes] = []
    async with mine.request("POST", CHAT, body=b"{}", headers=JSON) as answer:
        with pytest.raises(ApiError, match="sent nothing for") as caught:
            await answer.deliver(lambda data: seen.append(data) is not None, asyncio.Event().wait)  # type: ignore[arg-type]
    assert caught.value.status == 504
    assert b"".join(seen) == b"one" * 6
    await until(lambda: engines[0].open == 0)


async def test_a_server_that_does_not_accept_is_as_good_as_dead() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as stack:
        host, port = listener.getsockname()
        for _ in range(3):  # nobody accepts them, and there is no room for more
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, port))
        timeouts = UpstreamTimeouts(connect_s=0.1)
        pool = UpstreamPool(
            [f"http://{host}:{port}"], timeouts=timeouts, queue=QueueLimits(max_wait_s=0)
        )
        pool.open()
        with pytest.raises(Unavailable, match="Connection timeout"):
            await ask(pool)
        await pool.close()


async def test_a_server_of_another_protocol_is_a_502(
    engines: list[RawHttpEngine], pool: Pool
) -> None:
    async def behave(asked: ReceivedRequest, line: ServerConnection) -> None:
        line._writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")

    engines[0].behave = behave
    with pytest.raises(ApiError, match="does not speak HTTP") as caught:
        await ask(pool())
    assert caught.value.status == 502
