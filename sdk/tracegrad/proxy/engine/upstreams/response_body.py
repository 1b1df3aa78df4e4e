"""The body of an engine's answer as aiohttp receives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Self, cast

import aiohttp

from tracegrad.proxy.engine.upstreams.base import Consume, ConsumeFrames, Drained


class ResponseBody:
    """To be read once, after `begin`: pulled, as an iterator, or pushed, by `deliver`.

    `silence_s`: the longest time in which nothing comes, seconds; None: any. `broken_off` gives
    what is raised for an error of aiohttp's.
    """

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        *,
        silence_s: float | None,
        broken_off: Callable[[Exception], Exception],
    ) -> None:
        self._response = response
        self._content = response.content
        self._first = b""
        self._silence_s = silence_s
        self._broken_off = broken_off

    async def begin(self) -> bytes:
        """Waits for the first bytes and returns them; empty where there are none. Raises aiohttp's
        own errors."""
        self._first = self._content.read_nowait()
        if not self._first and not self._content.at_eof():
            with _SilenceTimer(self._response, self._silence_s) as silence:
                self._first = await self._next_piece(silence)
        return self._first

    async def __aiter__(self) -> AsyncIterator[bytes]:
        piece = self._first
        with _SilenceTimer(self._response, self._silence_s) as silence:
            while piece:
                yield piece
                try:
                    piece = await self._next_piece(silence)
                except (aiohttp.ClientError, TimeoutError) as error:
                    raise self._broken_off(error) from error

    async def deliver(
        self, consume: Consume, drained: Drained, frames: ConsumeFrames | None = None
    ) -> None:
        """As `UpstreamResponse.deliver`."""
        if not self._first:
            return
        if consume(self._first):
            await drained()
        with _SilenceTimer(self._response, self._silence_s) as silence:
            while not self._content.at_eof():
                try:
                    behind = await self._pushed(consume, silence, frames)
                except (aiohttp.ClientError, TimeoutError) as error:
                    raise self._broken_off(error) from error
                if behind:
                    await drained()

    async def _next_piece(self, silence: _SilenceTimer) -> bytes:
        """What has come, or comes next; empty at the end."""
        pieces: list[bytes] = []

        def keep(data: bytes) -> bool:
            pieces.append(data)
            return True  # one read is enough

        if not self._content.at_eof():
            await self._pushed(keep, silence)
        return b"".join(pieces)

    async def _pushed(
        self, consume: Consume, silence: _SilenceTimer, frames: ConsumeFrames | None = None
    ) -> bool:
        """Until the end (False), or until `consume` is behind (True)."""
        silence.begin()
        tap = _Tap(self._response, consume, silence, frames)
        try:
            tap.take()
            return await tap.done
        finally:
            tap.leave()
            silence.end()


class _Tap(asyncio.Protocol):
    """Stands between a connection and aiohttp's protocol for it, and hands on what that has read
    of the body at once.

    A reader that waits is woken by a future and by the loop, once a token: that costs as much as
    the token's way from one socket to the other.
    """

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        consume: Consume,
        silence: _SilenceTimer,
        frames: ConsumeFrames | None,
    ) -> None:
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._content = response.content
        self._consume = consume
        self._frames = frames
        self._silence = silence
        silence.on_limit = self.take
        # None where all of the answer has come, or where the connection is lost.
        self._transport = response.connection.transport if response.connection else None
        if self._transport is None:
            self._end_without_connection()
            return
        self._protocol = cast(asyncio.Protocol, self._transport.get_protocol())
        self._transport.set_protocol(self)

    def take(self) -> None:
        """Hand on what has come."""
        if self.done.done():
            return
        behind = False
        try:
            # To read may let a paused parser go on, which finds more at once.
            while not behind and (data := self._content.read_nowait()):
                behind = self._consume(data)
        except Exception as error:
            self.leave()
            self.done.set_exception(error)
            return
        if behind or self._content.at_eof():
            self.leave()
            self.done.set_result(behind)

    def leave(self) -> None:
        if self._transport is not None:
            self._transport.set_protocol(self._protocol)
            self._transport = None
        self._silence.on_limit = None

    def data_received(self, data: bytes) -> None:
        self._silence.begin()
        if self._frames is None or not self._took_frames(self._frames, data):
            self._protocol.data_received(data)
            self.take()

    def _took_frames(self, frames: ConsumeFrames, data: bytes) -> bool:
        """Whole pieces leave aiohttp's parser where it is: between two of them."""
        try:
            behind = frames(data)
        except Exception as error:
            self.leave()
            self.done.set_exception(error)
            return True
        if behind:
            self.leave()
            self.done.set_result(True)
        return behind is not None

    def eof_received(self) -> bool | None:
        stays_open = self._protocol.eof_received()
        self.take()
        return stays_open

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)
        self._end_without_connection()
        self.take()

    def _end_without_connection(self) -> None:
        """aiohttp hangs up over bytes that are no HTTP, and does not tell who reads the body."""
        if not self._content.is_eof() and self._content.exception() is None:
            what = "its end is missing, or its framing is no HTTP"
            self._content.set_exception(aiohttp.ClientPayloadError(what))

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


class _SilenceTimer:
    """Breaks off an answer of which nothing comes for `limit_s` while it is waited for.

    aiohttp's own `sock_read` cancels a timer and makes another with everything that comes, once a
    token: this is one timer for all of it. Until the next bytes come aiohttp's last one runs on.
    """

    def __init__(self, response: aiohttp.ClientResponse, limit_s: float | None) -> None:
        self._content = response.content
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._since: float | None = None
        self.on_limit: Callable[[], None] | None = None  # where no task waits for the next bytes
        connection = response.connection  # None where the answer is here already
        if limit_s and connection is not None and connection.protocol is not None:
            connection.protocol.read_timeout = None  # for this answer alone
            self._timer = self._loop.call_later(limit_s, self._look)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._since = None

    def _look(self) -> None:
        assert self._limit_s is not None
        silent_s = 0.0 if self._since is None else self._loop.time() - self._since
        if silent_s >= self._limit_s:
            self._content.set_exception(aiohttp.SocketTimeoutError())
            if self.on_limit is not None:
                self.on_limit()
        else:
            self._timer = self._loop.call_later(self._limit_s - silent_s, self._look)
