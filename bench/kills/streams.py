"""People who read streams while processes are killed: a client without retries sees each that
breaks."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import openai

from bench.kills.killer import Kill

READERS, TOKENS = 2, 100
PAUSE_S = 0.2  # between two of one reader: the agents are to have most of the engine


@dataclass(frozen=True, slots=True)
class ReadStream:
    """By the monotonic clock. `tokens`: as the usage at its end says; 0: it has none."""

    began_at: float
    ended_at: float
    tokens: int
    error: str | None


@dataclass(slots=True)
class Streams:
    read: list[ReadStream] = field(default_factory=list)

    def broken_by(self, kills: Sequence[Kill]) -> Mapping[str, tuple[int, int]]:
        """Victim -> streams in the middle of which it was killed, and how many of them broke;
        `several`: of those in which there were more kills than one."""
        found: dict[str, Counter[bool]] = {}
        for one in self.read:
            within = [each.victim for each in kills if one.began_at < each.at < one.ended_at]
            if within:
                victim = within[0] if len(within) == 1 else "several"
                found.setdefault(victim, Counter())[one.error is not None] += 1
        return {victim: (counts.total(), counts[True]) for victim, counts in found.items()}

    @property
    def short(self) -> int:
        """That ended well, and not with all the tokens that were asked for."""
        return sum(one.error is None and one.tokens != TOKENS for one in self.read)


@asynccontextmanager
async def readers() -> AsyncIterator[Streams]:
    """At work, until it is left."""
    streams = Streams()
    url = f"{os.environ['TRACEGRAD_URL']}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        tasks = [asyncio.create_task(_reader(client, streams)) for _ in range(READERS)]
        try:
            yield streams
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _reader(client: openai.AsyncOpenAI, streams: Streams) -> None:
    while True:
        began_at, tokens, error = time.monotonic(), 0, None
        try:
            async for chunk in await client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "tell me more"}],
                max_tokens=TOKENS,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            ):
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        except openai.APIError as broken:
            error = type(broken).__name__
        streams.read.append(ReadStream(began_at, time.monotonic(), tokens, error))
        await asyncio.sleep(PAUSE_S)
