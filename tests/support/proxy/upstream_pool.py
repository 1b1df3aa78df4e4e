"""What the tests of a pool of servers share: how to ask it, and a server that holds its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from support.engines.raw_http_engine import ReceivedRequest, ServerConnection
from tracegrad.proxy.engine.upstreams import UpstreamPool

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}

Pool = Callable[..., UpstreamPool]


async def ask(
    pool: UpstreamPool, sticky: str | None = None, body: bytes = b"{}"
) -> tuple[int, bytes]:
    async with pool.request("POST", CHAT, body=body, headers=JSON, sticky=sticky) as answer:
        return answer.status, await answer.read()


async def until(check: Callable[[], object], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Held:
    """Answers nothing before `go` is set, and then its name."""

    def __init__(self, name: bytes = b"held") -> None:
        self.go = asyncio.Event()
        self._name = name

    async def __call__(self, asked: ReceivedRequest, line: ServerConnection) -> None:
        await self.go.wait()
        await line.answer(self._name)
