"""A bare HTTP server on a loopback port that a test kills, silences and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ReceivedRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class ServerConnection:
    """The server's end of one connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def answer(
        self, body: bytes = b"{}", status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """A whole answer."""
        self._head(status, {"content-length": str(len(body)), **(headers or {})})
        self._writer.write(body)
        await self._writer.drain()

    async def begin(self, status: int = 200, kind: str = "text/event-stream") -> None:
        """The head of an answer in pieces."""
        self._head(status, {"transfer-encoding": "chunked", "content-type": kind})
        await self._writer.drain()

    async def piece(self, data: bytes) -> None:
        self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self._writer.drain()

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def end(self) -> None:
        await self.piece(b"")

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        self._writer.transport.abort()

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} Because", *(f"{k}: {v}" for k, v in headers.items())]
        self._writer.write("\r\n".join([*lines, "", ""]).encode())


Behaviour = Callable[[ReceivedRequest, ServerConnection], Awaitable[None]]


async def answers_ok(asked: ReceivedRequest, line: ServerConnection) -> None:
    await line.answer(b'{"ok":true}')


class RawHttpEngine:
    """`behave` answers calls; `/health` and `/v1/models` are answered with `health`."""

    def __init__(self, behave: Behaviour = answers_ok) -> None:
        self.behave = behave
        self.health = 200
        self.asked: list[ReceivedRequest] = []  # calls, in the order in which they came
        self.looks: list[ReceivedRequest] = []  # at its health
        self.open = 0  # connections
        self._port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> RawHttpEngine:
        """On its port; the first time on a free one."""
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self._port, backlog=1024
        )
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    def kill(self, *, politely: bool = False) -> None:
        """As the kernel does for a dead process: every connection is reset, or closed."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            if politely:
                writer.close()
            else:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.open += 1
        line = ServerConnection(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                asked = await _read(reader)
                if asked.path in ("/health", "/v1/models"):
                    self.looks.append(asked)
                    await line.answer(b"{}", self.health)
                    if asked.headers.get("connection") == "close":
                        break
                    continue
                self.asked.append(asked)
                await self._answer(asked, line, reader)
        self.open -= 1
        self._writers.discard(writer)
        writer.close()

    async def _answer(
        self, asked: ReceivedRequest, line: ServerConnection, reader: asyncio.StreamReader
    ) -> None:
        """Until it is answered or the caller has hung up."""
        answering = asyncio.ensure_future(self.behave(asked, line))
        listening = asyncio.ensure_future(reader.read(1))
        await asyncio.wait((answering, listening), return_when=asyncio.FIRST_COMPLETED)
        if listening.done():
            answering.cancel()
            raise ConnectionError("the caller hung up")
        listening.cancel()
        await asyncio.wait((listening,))
        await answering


async def _read(reader: asyncio.StreamReader) -> ReceivedRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *rest = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
    return ReceivedRequest(
        method, path, headers, await reader.readexactly(int(headers.get("content-length", 0)))
    )
