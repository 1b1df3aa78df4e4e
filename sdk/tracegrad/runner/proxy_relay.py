"""One address that a sandbox reaches, and nothing behind it: connections are passed on to it.

What comes from a sandbox comes from the agent that is scored. An open proxy believes rewards of
whoever brings no key, so the relay says in each request that an agent sends it (an agent's key
without a rollout): then the proxy takes calls and spans, and neither rewards nor ends, from it. Its
lines go in behind the first one, which nobody reads differently. "Connection: close": one request
of a connection is answered, so that no second one passes without them. The Host is the address's
own: proxies and mirrors look at it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tracegrad.protocol import API_KEY_PREFIX, KEY_HEADER

MAX_CONNECTIONS = 128  # of one sandbox: more are closed at once, the runner has few files to open
_CHUNK = 64 << 10
_HEAD_S = 60.0  # until a request's head is there
_MOST_HEAD = 128 << 10  # bytes
_CONNECT_S = 10.0
_AGENTS_KEY = f"{KEY_HEADER}: {API_KEY_PREFIX}\r\n".encode()
_REPLACED = (b"host:", b"connection:", b"keep-alive:")
_UNREACHABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)
_DEFAULT_PORTS = {"http": 80, "https": 443}
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class RelayTarget:
    """`marks_agent`: requests are marked as an agent's."""

    host: str
    port: int
    tls: bool
    marks_agent: bool

    @classmethod
    def of_url(cls, url: str, *, marks_agent: bool) -> RelayTarget:
        """Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
            raise ValueError(f"{url!r} is no http(s) URL: write http://HOST:PORT")
        port = parts.port or _DEFAULT_PORTS[parts.scheme]
        return cls(parts.hostname, port, parts.scheme == "https", marks_agent)

    @property
    def authority(self) -> str:
        """As a request's Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = _DEFAULT_PORTS["https" if self.tls else "http"]
        return host if self.port == default else f"{host}:{self.port}"

    def serves(self, url: str) -> bool:
        other = RelayTarget.of_url(url, marks_agent=self.marks_agent)
        if {self.host, other.host} <= _LOOPBACK:
            return (self.port, self.tls) == (other.port, other.tls)
        return self == other


class Relay:
    """Serves listening sockets, wherever these are, until it is closed."""

    def __init__(self, target: RelayTarget) -> None:
        self.target = target
        self._servers: list[asyncio.Server] = []
        self._open: set[asyncio.Task[None]] = set()

    async def serve(self, listening: socket.socket) -> None:
        self._servers.append(await asyncio.start_server(self._accept, sock=listening, limit=_CHUNK))

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for each in self._open:
            each.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        self._servers.clear()

    async def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._open.add(task)
        try:
            await self._pass_on(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # either side went away, or never spoke HTTP
        except asyncio.CancelledError:
            writer.transport.abort()  # the server's own callback would log it as an error
        finally:
            self._open.discard(task)
            writer.close()

    async def _pass_on(self, reader: StreamReader, writer: StreamWriter) -> None:
        head = await asyncio.wait_for(self._head(reader), _HEAD_S)
        try:
            theirs, ours = await asyncio.wait_for(self._connect(), _CONNECT_S)
        except (OSError, TimeoutError):
            writer.write(_UNREACHABLE)
            await writer.drain()
            return
        try:
            ours.write(head)
            await _first_of(_pump(theirs, writer), _pump(reader, ours))
        finally:
            ours.close()

    async def _head(self, reader: StreamReader) -> bytes:
        """Of a request, as it is passed on. Empty lines before it are allowed, and left out."""
        while not (first := await reader.readuntil(b"\n")).strip(b"\r\n"):
            pass
        kept: list[bytes] = []
        size = 0
        while not kept or kept[-1].strip(b"\r\n"):
            kept.append(await reader.readuntil(b"\n"))
            size += len(kept[-1])
            if size > _MOST_HEAD:
                raise asyncio.LimitOverrunError("the head is too long", size)
        kept = [line for line in kept if not line.lower().startswith(_REPLACED)]
        mark = _AGENTS_KEY if self.target.marks_agent else b""
        own = f"host: {self.target.authority}\r\nconnection: close\r\n".encode()
        return b"".join([first, mark, own, *kept])

    async def _connect(self) -> tuple[StreamReader, StreamWriter]:
        tls = ssl.create_default_context() if self.target.tls else None
        return await asyncio.open_connection(
            self.target.host, self.target.port, ssl=tls, limit=_CHUNK
        )


async def _pump(reader: StreamReader, writer: StreamWriter) -> None:
    while some := await reader.read(_CHUNK):
        writer.write(some)
        await writer.drain()


async def _first_of(answer: Coroutine[Any, Any, None], request: Coroutine[Any, Any, None]) -> None:
    """Until either side has ended: the proxy takes a client that sends no more for one that is
    gone, too."""
    tasks = [asyncio.create_task(answer), asyncio.create_task(request)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
