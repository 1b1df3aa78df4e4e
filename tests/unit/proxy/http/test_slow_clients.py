"""Clients that fetch their answer slowly or not at all, and how an answer is written."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from http.client import HTTPResponse
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from support.proxy.bounded_server import GET, LIMITS, SHORT, Echo, refused
from support.proxy.bounded_server import app as app
from support.proxy.bounded_server import client as client
from support.proxy.bounded_server import reader as reader
from support.proxy.bounded_server import server as server
from support.proxy.raw_http import Reader, bounded, connect
from support.proxy.servers import eventually
from tracegrad.proxy.http import protocol


def rest_of(client: socket.socket) -> bytes:
    """All that comes before the connection ends, in whichever way."""
    rest = b""
    try:
        while data := client.recv(65536):
            rest += data
    except ConnectionResetError:
        pass
    return rest


def with_lifespan(app: Any) -> Any:
    echo = Echo()

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        await (echo if scope["type"] == "lifespan" else app)(scope, receive, send)

    return both


def test_who_is_refused_may_finish_and_then_read(client: socket.socket, reader: Reader) -> None:
    client.sendall(b"GET /" + b"a" * 4100 + b" HTTP/1.1\r\n\r\n")
    for _ in range(3):
        time.sleep(0.05)
        client.sendall(b"x" * 50_000)
    assert "URL" in refused(reader.answer(), 414)


def test_a_client_that_does_not_read_is_dropped(
    app: Echo, server: str, caplog: pytest.LogCaptureFixture
) -> None:
    gone, sent = app.gone, app.sent
    with (
        caplog.at_level(logging.WARNING, "tracegrad.proxy"),
        connect(server, receive_buffer=4096) as client,
    ):
        client.sendall(b"GET /flood HTTP/1.1\r\n\r\n")
        eventually(lambda: app.gone == gone + 1)
    assert app.sent - sent < 1 << 20, "what waits for it is bounded"
    assert "took nothing of its answer for 0.3 s" in caplog.text


def test_a_client_that_reads_slowly_is_not_dropped(app: Echo, server: str) -> None:
    gone = app.gone
    with connect(server, receive_buffer=4096) as client:
        client.sendall(b"GET /flood HTTP/1.1\r\n\r\n")
        until = time.monotonic() + 5 * SHORT
        while time.monotonic() < until:
            assert client.recv(20_000)
            time.sleep(SHORT / 20)
        assert app.gone == gone
    eventually(lambda: app.gone == gone + 1)


def test_an_answer_that_is_not_fetched_keeps_no_connection(server: str) -> None:
    """Too little to pause anybody, too much for the system's buffers, and nothing comes after."""
    size = 40_000

    async def once(scope: Scope, receive: Receive, send: Send) -> None:
        length = (b"content-length", str(size).encode())
        close = (b"connection", b"close")
        await send({"type": "http.response.start", "status": 200, "headers": [length, close]})
        await send({"type": "http.response.body", "body": b"x" * size})

    with (
        bounded(with_lifespan(once), LIMITS, send_buffer=4096) as url,
        connect(url, receive_buffer=2048) as client,
    ):
        client.sendall(GET)
        time.sleep(3 * SHORT)
        assert len(rest_of(client)) < size


def test_who_writes_at_once_is_told_that_its_client_is_behind() -> None:
    """And what it then sends the ordinary way waits; nothing is lost or out of order."""
    piece, scopes, behind = b"x" * 10_000, list[Scope](), threading.Event()
    written = [0]

    async def pushes(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        write = scope[protocol.WRITE_CHUNK]
        assert write(b"too early") is None
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (is_behind := write(piece)) is False:
            written[0] += 1
            assert written[0] < 10_000
            await asyncio.sleep(0)
        assert is_behind is None, "nothing more until it has taken some"
        behind.set()
        await send({"type": "http.response.body", "body": b"drained", "more_body": True})
        assert write(b"end") is False
        assert scope[protocol.WRITE_FRAMES](b"2\r\n, \r\n4\r\nthen\r\n") is False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        assert write(b"too late") is None

    with (
        bounded(with_lifespan(pushes), LIMITS, send_buffer=4096) as url,
        connect(url, receive_buffer=4096) as client,
    ):
        client.sendall(GET)
        assert behind.wait(60)
        answer = HTTPResponse(client)
        answer.begin()
        assert answer.read() == piece * written[0] + b"drained" + b"end, then"
        eventually(lambda: protocol.WRITE_CHUNK not in scopes[0])
        assert protocol.WRITE_FRAMES not in scopes[0]


def test_a_whole_answer_may_be_fetched_slowly() -> None:
    size = 600_000

    async def once(scope: Scope, receive: Receive, send: Send) -> None:
        length = (b"content-length", str(size).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": b"x" * size})

    with (
        bounded(with_lifespan(once), LIMITS, send_buffer=4096) as url,
        connect(url, receive_buffer=4096) as client,
    ):
        client.sendall(GET)
        got, until = 0, time.monotonic() + 4 * SHORT
        while time.monotonic() < until:
            time.sleep(SHORT / 10)
            got += len(client.recv(8192))
        assert got < size // 2, "it is slow"
        while got < size:
            data = client.recv(65536)
            assert data
            got += len(data)


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


class Loop:
    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def turn(self) -> None:
        due, self.soon = self.soon, []
        for callback in due:
            callback()


def a_transport(transport: Transport, loop: Loop | None = None) -> protocol.CoalescingTransport:
    return protocol.CoalescingTransport(transport, loop or Loop())  # type: ignore[arg-type]


def test_pieces_of_one_turn_of_the_loop_leave_together_and_in_order() -> None:
    transport, loop = Transport(), Loop()
    together = a_transport(transport, loop)
    together.write(b"head ")
    together.write_soon(b"one ")
    together.write_soon(b"two ")
    assert transport.written == []
    loop.turn()
    assert transport.written == [b"head one two "]
    together.write_soon(b"three ")
    together.write(b"at once ")
    loop.turn()
    together.write_soon(b"last")
    together.close()
    loop.turn()
    assert transport.written == [b"head one two ", b"three at once ", b"last"]


def test_what_a_client_that_left_was_to_get_soon_is_dropped() -> None:
    """To write to a connection that is gone is an error in uvloop."""
    transport, loop = Transport(), Loop()
    together = a_transport(transport, loop)
    together.write(b"head ")
    together.write_soon(b"one ")
    transport.closed = True
    loop.turn()
    assert transport.written == []
    assert not together._soon


def test_an_answers_head_leaves_with_its_body() -> None:
    transport = Transport()
    together = a_transport(transport)
    together.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    together.write(b"HTTP/1.1 200 OK\r\n\r\n")
    together.write(b"HTTP/1.1 is a protocol")
    together.write(b"HTTP/1.1 200 OK is its first line")
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    assert transport.written == [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        head + b"HTTP/1.1 is a protocol",
        b"HTTP/1.1 200 OK is its first line",
    ]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_an_answer_without_a_body_has_its_head(end: str) -> None:
    transport = Transport()
    together = a_transport(transport)
    together.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    getattr(together, end)()
    together.flush()
    assert transport.written == [b"HTTP/1.1 204 No Content\r\n\r\n"]
