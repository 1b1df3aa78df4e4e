"""One server: asking it, noticing that it is gone, and that it is back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache

import aiohttp
from yarl import URL

from tracegrad.proxy.engine.upstreams.base import UpstreamResponse
from tracegrad.proxy.engine.upstreams.response_body import ResponseBody
from tracegrad.proxy.http.errors import ENGINE_DIED, ApiError, EngineDied, UpstreamError
from tracegrad.proxy.shared_counts import SharedCount
from tracegrad.urls import http_base, unix_socket

log = logging.getLogger("tracegrad.proxy")

# Seconds between looks at a server that is down: doubling, up to the longest.
FIRST_PROBE_S = 0.1

MAX_PROBE_INTERVAL_S = 2.0

PROBE_TIMEOUT_S = 5.0

RESTARTED = "it was restarted, and has the weights of its start until it is given others"

Admit = Callable[[str], Awaitable[bool]]
WasRestarted = Callable[[str], Awaitable[bool]]


class ReplicaRefused(Exception):
    """Nobody took the request."""


class ReplicaDropped(Exception):
    """The server took the request and went away without a byte of an answer."""


class Replica:
    """`in_flight` counts calls from `request` to `leave`, those of other workers too."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        health: str,
        headers: Mapping[str, str],
        admit: Admit | None,
        on_return: Callable[[], None],
        calls: SharedCount | None = None,
        is_held: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`session` is its own, and closed with it. `headers` go with looks at `health` (a path),
        not with calls. `admit` is asked whether a server that is healthy again may have calls.
        `calls` counts those in flight, where other processes have some there too. `is_held`:
        whether it is to have no new ones for now."""
        self.url = url
        self._base = http_base(url)
        self._calls = calls or SharedCount()
        self.fault: str | None = None  # why it is down
        self._session = session
        self._health = health
        # A connection that stayed open would be pooled, and die with a server that dies again.
        self._headers = {**headers, "connection": "close"}
        self._admit = admit
        self._on_return = on_return
        self._is_held = is_held
        self._looking: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        return self._calls.total()

    @property
    def up(self) -> bool:
        return self.fault is None

    @property
    def takes_calls(self) -> bool:
        return self.up and not self._is_held(self.url)

    async def request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[aiohttp.ClientResponse, UpstreamResponse]:
        """The response, to be closed, and what there is to read of it: its first bytes are here.

        A stream's headers come before its engine has done anything, so they do not count.
        Raises ReplicaRefused, ReplicaDropped, or ApiError.
        """
        self._calls.add(1)
        try:
            return await self._ask(method, path, body, headers)
        except BaseException as error:
            self._calls.add(-1)
            if isinstance(error, aiohttp.ClientError | TimeoutError):
                raise self._meaning(error) from error
            raise

    def leave(self) -> None:
        self._calls.add(-1)

    def mark_down(self, fault: str) -> None:
        if self.fault is not None:
            return
        self.fault = fault
        log.warning("the engine at %s gets no calls: %s", self.url, fault)
        self._looking = asyncio.create_task(self._look_until_back())

    async def notice_restart(self, restarted: WasRestarted) -> None:
        """Marks it down if nobody is there, or another process than the one of the last push: what
        is started and ended between two calls would be taken for what it was."""
        try:
            fault = RESTARTED if await restarted(self.url) else None
        except aiohttp.ClientError as error:
            fault = str(error) or type(error).__name__
        except (TimeoutError, ValueError):
            fault = None  # busy, or speaks of something else
        if fault is not None:
            self.mark_down(fault)

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await self._session.close()

    async def _ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[aiohttp.ClientResponse, UpstreamResponse]:
        # Not followed: a redirect would take the call, and the key, to a server nobody named.
        response = await self._session.request(
            method, _join(self._base, path), data=body, headers=headers, allow_redirects=False
        )
        coming = ResponseBody(
            response,
            silence_s=self._session.timeout.sock_read,
            broken_off=self._broken_off,
        )
        try:
            first = await coming.begin()
        except BaseException:
            response.close()
            raise
        if _says_engine_died(response.status, first):
            response.close()
            self.mark_down("its engine process died")
            raise ReplicaDropped("its engine process died")
        return response, UpstreamResponse(response.status, response.headers, coming)

    def _meaning(self, error: Exception) -> Exception:
        """What an error before the first byte of an answer comes down to."""
        reason = str(error) or type(error).__name__
        if isinstance(error, aiohttp.ClientSSLError):
            # Waiting fixes no certificate.
            return UpstreamError(f"the engine at {self.url} cannot be trusted: {reason}")
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return ReplicaRefused(reason)
        if isinstance(error, TimeoutError):
            # Overloaded or hanging? A look will tell.
            self.mark_down(reason)
            return self._silent()
        if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError):
            return ReplicaDropped(reason)
        return UpstreamError(f"the engine at {self.url} does not speak HTTP: {reason}")

    def _broken_off(self, error: Exception) -> ApiError:
        if isinstance(error, TimeoutError):
            return self._silent()
        reason = str(error) or type(error).__name__
        return EngineDied(f"the engine broke off its answer: {reason}")

    def _silent(self) -> ApiError:
        silence = self._session.timeout.sock_read
        message = f"the engine at {self.url} sent nothing for {silence:g} s"
        return UpstreamError(message, status=504, code="upstream_timeout")

    async def _look_until_back(self) -> None:
        loop = asyncio.get_running_loop()
        since, pause = loop.time(), FIRST_PROBE_S
        while not await self._is_back():
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PROBE_INTERVAL_S)
        self.fault = None
        log.warning("the engine at %s is back after %.1f s", self.url, loop.time() - since)
        self._on_return()

    async def _is_back(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        url = _join(self._base, self._health)
        try:
            async with self._session.get(url, headers=self._headers, timeout=timeout) as answer:
                # A 404 comes from a server that has no such route, a 401 from one with keys.
                healthy = answer.status < 500
        except (aiohttp.ClientError, TimeoutError):
            return False
        return healthy and (self._admit is None or await self._admitted(self._admit))

    async def _admitted(self, admit: Admit) -> bool:
        try:
            return await admit(self.url)
        except Exception:
            log.exception("whether %s may have calls again is unknown", self.url)
            return False


def _says_engine_died(status: int, first: bytes) -> bool:
    if status == 500 or first.startswith(b'data: {"error"'):
        return ENGINE_DIED in first
    return False


@lru_cache(maxsize=256)
def _join(base: str, path: str) -> URL:
    return URL(base + path)


def session_to(
    url: str, *, timeout: aiohttp.ClientTimeout, keepalive_s: float
) -> aiohttp.ClientSession:
    """For requests to `tracegrad.urls.http_base(url)`, as many at a time as there are."""
    path = unix_socket(url)
    connector: aiohttp.BaseConnector
    if path is None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=keepalive_s)
    else:
        connector = aiohttp.UnixConnector(path, limit=0, keepalive_timeout=keepalive_s)
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
    )
