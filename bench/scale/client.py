"""What agents send to the proxy, over HTTP and in any dialect, and how many bytes it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson

from bench.soak.dialects import Conversation, Dialect, Reply, WrongAnswer

_LIMIT_S = 120.0
# Servers close idle connections after five seconds, and one that closes as a call is sent is an
# error of nobody.
_IDLE_S = 2.0


class CallFailed(Exception):
    """The message begins with the kind of failure."""


class Client:
    """Of all agents; in an `async with`. `sent` and `received`: bytes of bodies."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.calls = self.posts = self.sent = self.received = 0

    async def __aenter__(self) -> Client:
        self._http = aiohttp.ClientSession(
            self._url,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=_LIMIT_S),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def call(
        self, dialect: Dialect, talk: Conversation, *, stream: bool, rollout_id: str | None
    ) -> Reply:
        """`rollout_id`: None for a call without a name. Raises CallFailed."""
        path = dialect.path(stream=stream)
        if rollout_id is not None:
            path = f"/rollouts/{rollout_id}{path}"
        raw = await self._post(path, dialect.body(talk, stream=stream))
        self.calls += 1
        try:
            return _streamed(dialect, raw) if stream else dialect.whole(orjson.loads(raw))
        except (WrongAnswer, KeyError, TypeError, ValueError) as error:
            raise CallFailed(f"wrong answer: {error!r}") from error

    async def post_events(self, events: Sequence[dict[str, Any]]) -> None:
        """Raises CallFailed."""
        await self._post("/api/events", {"events": events})
        self.posts += 1

    async def _post(self, path: str, body: dict[str, Any]) -> bytes:
        data = orjson.dumps(body)
        headers = {"content-type": "application/json"}
        try:
            async with self._http.post(path, data=data, headers=headers) as answer:
                raw = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise CallFailed(f"{type(error).__name__}: {error}") from error
        self.sent += len(data)
        self.received += len(raw)
        if answer.status != 200:
            raise CallFailed(f"status {answer.status}: {raw[:200].decode(errors='replace')}")
        return raw


def _streamed(dialect: Dialect, raw: bytes) -> Reply:
    """Raises WrongAnswer."""
    reader, done = dialect.stream(), False
    for line in raw.split(b"\n"):
        if line.startswith(b"data:"):
            data = line[5:].strip()
            done = data == b"[DONE]"
            if not done:
                reader.feed(orjson.loads(data))
    return reader.reply(done=done)
