"""The plainest proxy that the same libraries make: bytes in, bytes out, nothing read.

uvicorn with uvloop and httptools, a bare ASGI application, aiohttp's client: what tracegrad's
proxy is made of, without anything that it does. `python -m bench.proxy.passthrough --port N
--upstream URL`.
"""

from __future__ import annotations

import argparse

import aiohttp
import uvicorn
from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, Scope


class PassThrough:
    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._session: aiohttp.ClientSession | None = None

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        if scope["type"] != "http":
            return
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None)
            )
        url = self._upstream + scope["path"]
        async with self._session.post(
            url, data=await _body(receive), headers={"content-type": "application/json"}
        ) as answer:
            kind = answer.headers["content-type"].encode()
            headers = [(b"content-type", kind)]
            if answer.content_length is not None:
                headers.append((b"content-length", b"%d" % answer.content_length))
            await send(
                {
                    "type": "http.response.start",
                    "status": answer.status,
                    "headers": headers,
                    "trailers": False,
                }
            )
            async for data in answer.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _body(receive: ASGIReceiveCallable) -> bytes:
    parts = []
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break
        parts.append(message["body"])
        more = message["more_body"]
    return b"".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True)
    options = parser.parse_args()
    uvicorn.run(
        PassThrough(options.upstream),
        host="127.0.0.1",
        port=options.port,
        loop="uvloop",
        http="httptools",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        lifespan="off",
        timeout_keep_alive=75,
        backlog=2048,
    )
