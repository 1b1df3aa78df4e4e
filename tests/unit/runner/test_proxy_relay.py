"""The one address that a sandbox reaches: passed on, marked as an agent's, and bounded."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from support.engines.mock_engine import MockEngine
from support.proxy.proxy_with_engine import ProxyWithEngine, proxy_with_engine
from support.proxy.servers import EngineServer, serving
from tracegrad.runner import proxy_relay
from tracegrad.runner.proxy_relay import Relay, RelayTarget
from tracegrad.store import Store

CALL = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[ProxyWithEngine]:
    Store.open(f"sqlite:///{tmp_path}/store.db").close()
    server = EngineServer()
    with (
        serving(server, lifespan="off") as server.url,
        proxy_with_engine(server, MockEngine(), tmp_path / "store.db") as found,
    ):
        yield found
        found.close_clients()


@asynccontextmanager
async def relayed(url: str, *, marks_agent: bool = True) -> AsyncIterator[str]:
    relay = Relay(RelayTarget.of_url(url, marks_agent=marks_agent))
    listening = socket.create_server(("127.0.0.1", 0))
    await relay.serve(listening)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        await relay.close()


async def test_calls_pass_streamed_too_and_a_client_may_keep_its_connection(
    proxy: ProxyWithEngine,
) -> None:
    path = "/rollouts/r1/v1/chat/completions"
    async with relayed(proxy.url) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for _ in range(3):
            assert (await client.post(path, json=CALL)).status_code == 200
        async with client.stream("POST", path, json={**CALL, "stream": True}) as answer:
            lines = [line async for line in answer.aiter_lines()]
    assert "data: [DONE]" in lines
    assert len(proxy.turns_of("r1")) == 4


REWARD = {"events": [{"type": "reward", "rollout_id": "r1", "value": 1.0}]}


async def test_an_open_proxy_takes_no_reward_by_this_way(proxy: ProxyWithEngine) -> None:
    """It would from whoever brings no key."""
    async with relayed(proxy.url) as url, httpx.AsyncClient(timeout=60) as client:
        by_the_relay = await client.post(f"{url}/api/events", json=REWARD)
        assert by_the_relay.status_code == 403, by_the_relay.text
        assert "neither rewards" in by_the_relay.text
        assert (await client.get(f"{url}/metrics")).status_code == 403
        by_no_relay = await client.post(f"{proxy.url}/api/events", json=REWARD)
        assert by_no_relay.status_code == 200, by_no_relay.text


async def raw(url: str, request: bytes) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


BODY = json.dumps(REWARD).encode()
EVENTS = (
    b"POST /api/events HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
)
STARTED = {"events": [{"type": "rollout_started", "rollout_id": "r1", "task_id": "t"}]}
CHAT_BODY = json.dumps(CALL).encode()
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n%s\r\n%s"


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(CHAT % (len(CHAT_BODY), b"", CHAT_BODY) + EVENTS, id="pipelined"),
        pytest.param(
            CHAT % (len(CHAT_BODY), b"connection: keep-alive\r\n", CHAT_BODY) + EVENTS,
            id="keep-alive",
        ),
        pytest.param(EVENTS.replace(b"\r\n", b"\n"), id="bare-newlines"),
        pytest.param(b"\r\n\r\n" + EVENTS, id="empty-lines-first"),
        pytest.param(EVENTS.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r"), id="bare-return"),
        pytest.param(EVENTS.replace(b" HTTP/1.1", b" HTTP/1.0"), id="http-1.0"),
        pytest.param(EVENTS.replace(b"host:", b"x-tracegrad-key: other\r\nhost:"), id="own-key"),
    ],
)
async def test_no_spelling_of_a_request_goes_past_the_mark(
    proxy: ProxyWithEngine, request_bytes: bytes
) -> None:
    async with relayed(proxy.url) as url:
        answer = await raw(url, request_bytes)
    assert answer.count(b"HTTP/1.1 2") <= request_bytes.count(b"/v1/chat")
    proxy.http.post("/api/events", json=STARTED).raise_for_status()
    assert proxy.store.rewards("r1") == [], answer


async def test_a_proxy_that_is_away_is_said_and_found_again(proxy: ProxyWithEngine) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{free.getsockname()[1]}"
        async with relayed(away) as url:
            answer = await raw(url, EVENTS)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in answer


async def test_a_mirror_gets_what_was_sent_under_its_own_name() -> None:
    seen = asyncio.Queue[bytes]()

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await seen.put(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    server = await asyncio.start_server(answers, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with relayed(f"http://localhost:{port}/simple", marks_agent=False) as url:
        assert (await raw(url, b"GET /simple/ HTTP/1.1\r\n\r\n")).endswith(b"ok")
    head = f"GET /simple/ HTTP/1.1\r\nhost: localhost:{port}\r\nconnection: close\r\n\r\n"
    assert await seen.get() == head.encode()
    server.close()


async def test_a_crowd_of_connections_is_bounded(
    proxy: ProxyWithEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_relay, "MAX_CONNECTIONS", 2)
    async with relayed(proxy.url) as url:
        host, port = url.removeprefix("http://").split(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        assert await raw(url, EVENTS) == b""
        for _, writer in idle:
            writer.close()
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("url", "other", "same"),
    [
        ("http://localhost:4141", "http://127.0.0.1:4141/rollouts/x/v1", True),
        ("http://127.0.0.1:4141", "http://127.0.0.1:4142/", False),
        ("http://proxy/base", "http://proxy:80/v1", True),
        ("https://proxy", "http://proxy:443", False),
        ("http://proxy:4141", "http://other:4141", False),
    ],
)
def test_an_address_is_known_in_each_of_its_spellings(url: str, other: str, same: bool) -> None:
    assert RelayTarget.of_url(url, marks_agent=True).serves(other) is same


@pytest.mark.parametrize("url", ["", "proxy:4141", "unix:///socket", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="write http://HOST:PORT"):
        RelayTarget.of_url(url, marks_agent=True)
