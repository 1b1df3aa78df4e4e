"""Agents that work until the proxy fails them, and what they were told is done."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import httpx
import openai

from support.agents.toy_agents import CompletedToyCall, ToyAgents
from tracegrad.store import Store


class GroupLoad:
    """`with Crowd(url) as crowd:` groups of four attempts, one group after the other.

    Without the SDK, whose outbox would go on trying to reach a proxy that is dead.
    """

    def __init__(self, url: str, *, patient: bool = False) -> None:
        """`patient`: a failure ends no more than its attempt."""
        self.toys = ToyAgents(url)
        self.patient = patient
        self.failures: list[BaseException] = []
        self.failure: BaseException | None = None  # the first one; then the crowd goes home
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "a call hangs"

    async def _work(self) -> None:
        number = 0
        while not self._over.is_set() and self.failure is None:
            number += 1
            await self._group(f"{self.toys.url} {number}")

    async def _group(self, task: str) -> None:
        toys = self.toys
        attempts = [toys.by_path(task), toys.by_key(task), toys.by_path(task), toys.by_key(task)]
        for failure in await asyncio.gather(*attempts, return_exceptions=True):
            if failure is not None:
                assert isinstance(failure, openai.OpenAIError | httpx.HTTPError), failure
                self.failures.append(failure)
                self.failure = self.failure or (None if self.patient else failure)


def missing_calls(store_url: str, toys: Iterable[ToyAgents]) -> list[object]:
    """What agents were told is done, and the store does not have (exactly once)."""
    lost: list[object] = []
    with Store.open(store_url, create=False) as store:
        for each in toys:
            stored = {
                rollout_id: store.rollout(rollout_id)
                for rollout_id in {seen.rollout_id for seen in each.seen}
            }
            ids = Counter(
                (turn.response or {}).get("id") for r in stored.values() for turn in r.turns
            )
            lost += [seen for seen in each.seen if not _is_stored(seen, ids)]
            lost += [r for r in each.finished if stored[r].summary.reward is None]
    return lost


def _is_stored(seen: CompletedToyCall, ids: Counter[str | None]) -> bool:
    return ids[seen.said.completion_id] == 1
