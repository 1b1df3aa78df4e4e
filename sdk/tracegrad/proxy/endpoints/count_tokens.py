"""How many tokens a prompt would have: asked of the engine, recorded nowhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tracegrad.chat.call import Call
from tracegrad.proxy.auth.middleware import caller_of, engine_headers
from tracegrad.proxy.dialects.base import Dialect
from tracegrad.proxy.endpoints.llm_call import ProxyServices
from tracegrad.proxy.engine.response import read_error
from tracegrad.proxy.http.errors import ApiError, UpstreamError
from tracegrad.proxy.http.request import ClientDisconnected, cancel_on_disconnect, read_body

# vLLM's; it is not served to clients under this name.
PATH = "/tokenize"

_RENDERING = ("messages", "tools", "model", "chat_template_kwargs")


class CountTokensEndpoint:
    """`parse` reads the client's request, `shape` makes its answer of the number."""

    def __init__(
        self,
        dialect: Dialect,
        services: ProxyServices,
        *,
        parse: Callable[[bytes, Mapping[str, Any]], Call],
        shape: Callable[[int], bytes],
    ) -> None:
        self._dialect = dialect
        self._services = services
        self._parse = parse
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await read_body(receive)
            run, size = self._services.workers.run, len(raw)
            call = await run(size, self._parse, raw, scope["path_params"])
            caller = caller_of(scope)
            call = await run(size, self._services.rules.apply, call, admin=caller.admin)
            del raw
            async with cancel_on_disconnect(receive):
                tokens = await self._count(call, size, engine_headers(caller))
            response = Response(self._shape(tokens), media_type="application/json")
        except ApiError as error:
            response = error.response(self._dialect.error(error))
        except ClientDisconnected:
            return
        await response(scope, receive, send)

    async def _count(self, call: Call, size: int, headers: dict[str, str]) -> int:
        body = {name: call.body[name] for name in _RENDERING if name in call.body}
        if self._services.model is not None:
            body["model"] = self._services.model
        asked = await self._services.workers.run(size, orjson.dumps, body)
        async with self._services.upstream.request(
            "POST", PATH, body=asked, headers=headers
        ) as engine:
            raw = await engine.read()
        if engine.status != 200:
            raise read_error(engine.status, raw, engine.headers)
        try:
            return int(orjson.loads(raw)["count"])
        except (ValueError, KeyError, TypeError) as error:
            raise UpstreamError("the engine's count of tokens cannot be read") from error
