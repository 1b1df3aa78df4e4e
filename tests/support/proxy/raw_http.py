"""HTTP as bytes on a socket: for what no client library would send."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson
from starlette.types import ASGIApp

from support.proxy.servers import eventually, running
from tracegrad.proxy.http.limits import ConnectionLimits
from tracegrad.proxy.http.protocol import server_config


@contextmanager
def bounded(
    app: ASGIApp, limits: ConnectionLimits, *, send_buffer: int | None = None
) -> Iterator[str]:
    """The application behind the proxy's own server; its URL. `send_buffer`: bytes that the
    system takes from it for a client that does not read."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    with running(server_config(app, limits), listener) as url:
        yield url


def connect(url: str, *, receive_buffer: int | None = None) -> socket.socket:
    parts = urlsplit(url)
    client = socket.socket()
    client.settimeout(60)
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect((parts.hostname, parts.port))
    return client


def hang_up(url: str, body: Any, *, once: Callable[[], Any]) -> None:
    """A client that posts `body` and leaves, without reading, as soon as `once` holds: a time-out
    of its own might end it before the call is where the test means it to be."""
    content = orjson.dumps(body)
    parts = urlsplit(url)
    head = (
        f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    with connect(url) as client:
        client.sendall(head.encode() + content)
        eventually(once)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return orjson.loads(self.body)


class Reader:
    """The answers that come over a connection, one after the other."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._rest = b""

    def answer(self, *, to_head: bool = False) -> Answer | None:
        """The next one; None when the connection ends before it."""
        while b"\r\n\r\n" not in self._rest:
            if not self._more():
                assert not self._rest, f"half an answer: {self._rest!r}"
                return None
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        found = re.fullmatch(r"HTTP/1\.1 (\d{3}) .*", first)
        assert found is not None, first
        headers = {
            name.lower(): value.strip() for name, _, value in (p.partition(":") for p in lines)
        }
        length = 0 if to_head else int(headers.get("content-length", 0))
        while len(self._rest) < length:
            assert self._more(), "the body breaks off"
        body, self._rest = self._rest[:length], self._rest[length:]
        return Answer(int(found[1]), headers, body)

    def next_answer(self, *, to_head: bool = False) -> Answer:
        """Which there must be."""
        found = self.answer(to_head=to_head)
        assert found is not None, "the connection ended without an answer"
        return found

    def ended(self) -> bool:
        """Waits until the server has closed the connection; False if it says more."""
        return not self._rest and not self._more()

    def _more(self) -> bool:
        try:
            data = self._client.recv(65536)
        except ConnectionResetError:
            return False
        self._rest += data
        return bool(data)
