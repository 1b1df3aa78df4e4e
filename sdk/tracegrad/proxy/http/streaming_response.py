"""The client's end of a stream: begun when there is something to say, kept alive while not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from starlette.types import Scope, Send

from tracegrad.proxy.http.protocol import WRITE_CHUNK, WRITE_FRAMES, WriteChunk


class StreamedResponse:
    """Bytes to one client, between `__enter__` and `__exit__`, on one event loop.

    After `every_s` seconds without a word it sends what `keepalive` returns, first of all the
    status 200: what goes wrong from then on can only be said in the stream.
    """

    def __init__(
        self,
        scope: Scope,
        send: Send,
        content_type: str,
        keepalive: Callable[[], bytes],
        every_s: float,
    ) -> None:
        self._send = send
        # Under another server than ours there is none, and all goes through `send`.
        self._write_chunk: WriteChunk | None = scope.get(WRITE_CHUNK)
        self._write_frames: WriteChunk | None = scope.get(WRITE_FRAMES)
        self._content_type = content_type
        self._keepalive = keepalive
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._spoke_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._filler: asyncio.Task[None] | None = None
        self._unsent: list[bytes] = []
        self.begun = False

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._every_s, self._tick)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._timer is not None, "was entered"
        self._timer.cancel()
        if self._filler is not None:
            self._filler.cancel()

    def write(self, data: bytes) -> bool:
        """Send `data` without waiting. True: `drain` before more is written."""
        self._spoke_at = self._loop.time()
        if self._write_chunk is not None and not self._unsent:
            behind = self._write_chunk(data)
            if behind is not None:
                return behind
        self._unsent.append(data)
        return True

    def write_frames(self, frames: bytes) -> bool:
        """As `write`, of what is in whole pieces of HTTP's chunked encoding already."""
        self._spoke_at = self._loop.time()
        if self._write_frames is not None and not self._unsent:
            behind = self._write_frames(frames)
            if behind is not None:
                return behind
        self._unsent += _contents(frames)
        return True

    async def drain(self) -> None:
        """Until the client has taken what was written, or most of it."""
        unsent, self._unsent = self._unsent, []
        if unsent or self.begun:  # what was written may be empty: the stream begins all the same
            await self.send(b"".join(unsent))

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """Send `data` now; `last` ends the response."""
        self._spoke_at = self._loop.time()
        if not self.begun:
            self.begun = True
            await self._send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [
                        (b"content-type", self._content_type.encode()),
                        (b"cache-control", b"no-cache"),
                        (b"x-accel-buffering", b"no"),
                    ],
                }
            )
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    def _tick(self) -> None:
        silent_s = self._loop.time() - self._spoke_at
        # A hundredth early is early enough: timers are no better than that.
        if silent_s > self._every_s * 0.99 and (self._filler is None or self._filler.done()):
            self._filler = asyncio.create_task(self.send(self._keepalive()))
            silent_s = 0.0
        self._timer = self._loop.call_later(max(self._every_s - silent_s, 0.01), self._tick)


def _contents(frames: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(frames):
        start = frames.index(b"\r\n", at) + 2
        end = start + int(frames[at : start - 2], 16)
        yield frames[start:end]
        at = end + 2
