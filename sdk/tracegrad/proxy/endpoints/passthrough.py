"""What the engine answers and the proxy only passes on: models, embeddings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tracegrad.proxy.auth.middleware import Caller, caller_of, engine_headers
from tracegrad.proxy.engine.response import read_error
from tracegrad.proxy.engine.upstreams import Upstream
from tracegrad.proxy.http.errors import ApiError
from tracegrad.proxy.http.request import (
    ClientDisconnected,
    Headers,
    cancel_on_disconnect,
    headers_of,
    read_body,
)

ShapeResponse = Callable[[bytes, Headers, Mapping[str, Any]], bytes]
ReadRequest = Callable[[bytes, Caller], Awaitable[bytes]]


class PassthroughEndpoint:
    """One route of the engine's, without a record: nothing is sampled there.

    `read` makes the engine's body of the client's, or raises ApiError; `shape` makes the client's
    of the engine's, given the request's headers and path.
    """

    def __init__(
        self,
        upstream: Upstream,
        method: str,
        path: str,
        *,
        read: ReadRequest | None = None,
        shape: ShapeResponse | None = None,
    ) -> None:
        self._upstream = upstream
        self._method = method
        self._path = path
        self._read = read
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._answer(scope, receive)
        except ApiError as error:
            response = error.response()
        except ClientDisconnected:
            return
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        body, caller = await read_body(receive), caller_of(scope)
        if self._read is not None:
            body = await self._read(body, caller)
        async with (
            cancel_on_disconnect(receive),
            self._upstream.request(
                self._method,
                self._path,
                body=body or None,
                headers=engine_headers(caller),
            ) as engine,
        ):
            raw = await engine.read()
        if engine.status != 200:
            raise read_error(engine.status, raw, engine.headers)
        if self._shape is not None:
            raw = self._shape(raw, headers_of(scope), scope["path_params"])
        kind = engine.headers.get("content-type", "application/json")
        return Response(raw, media_type=kind)
