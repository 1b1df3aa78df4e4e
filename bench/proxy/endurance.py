"""What only tracegrad's proxy is asked: memory over many calls, and bytes in its store."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import aiohttp

from bench.proxy.calls import MODEL, PROMPTS, REPLY_TOKENS, Prompt
from bench.proxy.cells import PATH, requests
from bench.proxy.load import Load, measure
from bench.proxy.servers import HOST, Server
from bench.proxy.text import passage

PROMPT_TOKENS = 8192
TURNS = 20
# Tokens that a turn adds: the reply before it, and what the agent says to it.
TURN_TOKENS = 600
_CONCURRENCY = 32
_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of the proxy, after so many calls."""

    samples: tuple[tuple[int, int], ...]
    errors: tuple[str, ...]

    @property
    def grown(self) -> float:
        """The last sample over the one half-way, less 1. A cache that fills has filled by then."""
        return self.samples[-1][1] / self.samples[len(self.samples) // 2][1] - 1


async def memory(server: Server, calls: int, *, samples: int = 10) -> Memory:
    """Whole answers with 8k prompts, in rollouts of a few calls."""
    found = [(0, server.usage().rss)]
    errors: list[str] = []
    step = calls // samples
    for number in range(samples):
        some = islice(requests(PROMPT_TOKENS, stream=False), step)
        load = Load(some, _CONCURRENCY, issue_s=_LIMIT_S, limit_s=_LIMIT_S)
        measured = await measure(server.port, load)
        errors += measured.errors
        errors += ["no end"] * measured.unfinished
        found.append(((number + 1) * step, server.usage().rss))
    return Memory(tuple(found), tuple(errors))


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes of the database a turn: the first of a conversation, and each later one."""

    first: float
    later: tuple[float, ...]


async def stored(server: Server, store: Path, *, conversations: int = 16) -> Stored:
    """Conversations side by side, a turn of each before the next of any.

    A database grows by whole pages; over many conversations that evens out.
    """
    talks = [_Talk(number) for number in range(conversations)]
    # The first rows of a database bring pages for every table and index.
    await _turn(server, [_Talk(conversations + number) for number in range(4)])
    sizes = [_size(store)]
    for _ in range(TURNS):
        await _turn(server, talks)
        sizes.append(_size(store))
    grown = [(b - a) / conversations for a, b in pairwise(sizes)]
    return Stored(grown[0], tuple(grown[1:]))


class _Talk:
    """One conversation of one rollout."""

    def __init__(self, number: int) -> None:
        self.headers = {"x-tracegrad-rollout": f"bench-talk-{number}"}
        self._number = number
        self._turns = 0
        # Its own prompt, though not one that the engine has at hand.
        self._messages: list[dict[str, Any]] = [*Prompt(PROMPT_TOKENS, PROMPTS + number).messages]

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "messages": self._messages,
            "max_tokens": REPLY_TOKENS,
            "temperature": 1.0,
        }

    def heard(self, answer: Mapping[str, Any]) -> None:
        """The reply, and what the agent says to it."""
        self._turns += 1
        text = answer["choices"][0]["message"]["content"]
        words = passage(TURN_TOKENS - REPLY_TOKENS, f"talk {self._number} turn {self._turns}")
        self._messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "".join(words)},
        ]


async def _turn(server: Server, talks: Sequence[_Talk]) -> None:
    async with aiohttp.ClientSession() as session:
        for talk in talks:
            url = f"http://{HOST}:{server.port}{PATH}"
            async with session.post(url, json=talk.body, headers=talk.headers) as answer:
                answer.raise_for_status()
                talk.heard(await answer.json())


def _size(store: Path) -> int:
    """After what is in the write-ahead log has been moved into the database."""
    with sqlite3.connect(store, timeout=30) as connection:
        busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert not busy, "nobody else uses the store now"
    connection.close()
    return store.stat().st_size
