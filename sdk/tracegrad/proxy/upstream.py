"""The engine behind the proxy, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp

from tracegrad.proxy.errors import Unavailable

# vLLM's server drops an idle connection after 5 s; we must be the first to let go.
KEEPALIVE_S = 3.0
CONNECT_S = 10.0


class Upstream:
    """Calls to one engine, between `open` and `close`, on one event loop."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url
        self._own = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._opened: aiohttp.ClientSession | None = None

    def open(self) -> None:
        self._opened = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            # No limit on the whole: an answer takes as long as it takes, and a client that no
            # longer wants it hangs up, which ends the call here too.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )

    async def close(self) -> None:
        await self._session.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._opened is not None, "open() comes first"
        return self._opened

    @asynccontextmanager
    async def request(
        self, method: str, path: str, *, body: bytes | None, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The engine's answer, whatever its status. Leaving early closes the connection, and
        with that the engine stops generating. Raises Unavailable when nobody answers."""
        try:
            response = await self._send(method, path, body, {**headers, **self._own})
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise self._unreachable(error) from error
        async with response:
            yield response

    async def models(self) -> bytes:
        """The engine's list of models. Raises ApiError."""
        async with self.request("GET", "/v1/models", body=None, headers={}) as answer:
            return await answer.read()

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        url = self.url + path
        try:
            return await self._session.request(method, url, data=body, headers=headers)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if isinstance(error, aiohttp.ClientConnectorError):
                raise
            # A pooled connection that the engine closed at the same moment. Nothing of the
            # answer has been seen, so asking again changes nothing for the client.
            return await self._session.request(method, url, data=body, headers=headers)

    def _unreachable(self, error: Exception) -> Unavailable:
        reason = str(error) or type(error).__name__
        return Unavailable(
            f"the engine at {self.url} does not answer: {reason}", code="upstream_unreachable"
        )
