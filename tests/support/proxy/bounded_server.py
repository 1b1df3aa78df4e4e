"""The proxy's own server behind tight limits, with an echo for an application and raw sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from support.proxy.raw_http import Answer, Reader, bounded, connect
from tracegrad.proxy.http.limits import ConnectionLimits

GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
SHORT = 0.3
SOON = SHORT + 20  # as soon as a busy machine can; whatever else ends a connection takes longer
LIMITS = ConnectionLimits(
    head_bytes=8192,
    head_fields=20,
    head_s=SHORT,
    body_s=SHORT,
    send_idle_s=SHORT,
    connections=20,
    idle_s=1,
)


class Echo:
    """Says what it was asked. `/flood` never ends; `/early` answers before it has read, `/late`
    reads only after a while."""

    def __init__(self) -> None:
        self.gone = 0
        self.sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for what in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{what}.complete"})
            return
        if scope["path"] == "/flood":
            await self._flood(receive, send)
            return
        if scope["path"] == "/late":
            await asyncio.sleep(3 * SHORT)
        size, names = 0, [name.decode() for name, _ in scope["headers"]]
        while scope["path"] != "/early":
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone += 1
                return
            size += len(message["body"])
            if not message["more_body"]:
                break
        body = f"{scope['method']} {scope['path']} {size} {','.join(names)}".encode()
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    async def _flood(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def pour() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
                self.sent += 4096
                await asyncio.sleep(0)

        pouring = asyncio.create_task(pour())
        assert (await receive())["type"] == "http.disconnect"
        pouring.cancel()
        self.gone += 1


@pytest.fixture(scope="module")
def app() -> Echo:
    return Echo()


@pytest.fixture(scope="module")
def server(app: Echo) -> Iterator[str]:
    with bounded(app, LIMITS, send_buffer=8192) as url:
        yield url


@pytest.fixture
def client(server: str) -> Iterator[socket.socket]:
    with connect(server) as client:
        yield client


@pytest.fixture
def reader(client: socket.socket) -> Reader:
    return Reader(client)


def refused(answer: Answer | None, status: int) -> str:
    """What a refusal says; its shape is one that all clients read."""
    assert answer is not None
    assert answer.status == status
    assert answer.headers["connection"] == "close"
    assert answer.headers["content-type"] == "application/json"
    reported: dict[str, Any] = answer.json()
    assert reported["type"] == "error"
    assert set(reported["error"]) == {"message", "type", "param", "code"}
    message: str = reported["error"]["message"]
    return message


def is_taken(client: socket.socket, data: bytes) -> bool:
    try:
        client.sendall(data)
    except OSError:
        return False
    return True
