"""An engine that answers whatever it is asked, so that what fails is the proxy's doing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from support.engines.mock_engine import Answer, Json, MockEngine

_MOST = 4  # choices


@dataclass
class LenientEngine(MockEngine):
    async def _chat(self, request: Request) -> Response:
        return await self._bounded(request) or await super()._chat(request)

    async def _completions(self, request: Request) -> Response:
        return await self._bounded(request) or await super()._completions(request)

    async def _tokenize(self, request: Request) -> Response:
        self.requests.append(orjson.loads(await request.body()))
        return JSONResponse({"count": 3, "max_model_len": 100_000, "tokens": [1, 2, 3]})

    async def _embeddings(self, request: Request) -> Response:
        if (refused := await self._bounded(request)) is not None:
            return refused
        return await super()._embeddings(request)

    async def _bounded(self, request: Request) -> Response | None:
        """A refusal of what no engine would serve: no JSON object, or too many choices."""
        try:
            body = orjson.loads(await request.body())
            n = (body.get("n") or 1) if isinstance(body, dict) else _MOST + 1
        except orjson.JSONDecodeError:
            n = _MOST + 1
        if isinstance(n, int) and n <= _MOST:
            return None
        refusal = {"message": "not like this", "type": "invalid_request_error", "param": "n"}
        return JSONResponse({"error": {**refusal, "code": None}}, 400)

    def _answer(self, body: Json, says: Sequence[Answer]) -> Json:
        return super()._answer(_plain(body), says)

    async def _chunks(self, body: Json, says: Sequence[Answer], head: Json) -> AsyncIterator[Json]:
        async for chunk in super()._chunks(_plain(body), says, head):
            yield chunk


def _plain(body: Json) -> Json:
    """The request with messages that the mock can render."""
    return {**body, "messages": [{"role": "user", "content": "anything"}], "tools": None}
