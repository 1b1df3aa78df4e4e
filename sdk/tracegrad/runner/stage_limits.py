"""How many attempts may be in each of their stages at once, and for how long.

An attempt that waits for a stage holds no place in the one before: sandboxes start, are scored and
stop while other attempts' agents run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimeouts:
    """Seconds; None: no bound. A task has its own for the agent and for the reward.

    Attributes:
        start_s: of a sandbox.
        stop_s: of a sandbox; what takes longer is left to its backend's end.
        silent_s: an agent that prints nothing and makes no LLM call for so long is ended. A call is
            seen when it is answered: no shorter than the longest one.
    """

    start_s: float | None = 600.0
    stop_s: float | None = 60.0
    silent_s: float | None = None


class StageLimits:
    """Of one run; all on one event loop.

    Args:
        agents: that run at once.
        starts, stops: sandboxes that start or stop at once.
        rewards: commands that score at once.
        stagger_s: between the beginnings of two starts.
    """

    def __init__(
        self,
        agents: int,
        *,
        starts: int = 8,
        stops: int = 8,
        rewards: int | None = None,
        stagger_s: float = 0.0,
    ) -> None:
        self._agents = asyncio.Semaphore(agents)
        self._starts = asyncio.Semaphore(starts)
        self._stops = asyncio.Semaphore(stops)
        self._rewards = asyncio.Semaphore(rewards or agents)
        self._stagger_s = stagger_s
        self._next_start = 0.0

    @asynccontextmanager
    async def start(self) -> AsyncIterator[None]:
        async with self._starts:
            now = asyncio.get_running_loop().time()
            begin = max(now, self._next_start)
            self._next_start = begin + self._stagger_s
            await asyncio.sleep(begin - now)
            yield

    def agent(self) -> AbstractAsyncContextManager[None]:
        return self._agents

    def reward(self) -> AbstractAsyncContextManager[None]:
        return self._rewards

    def stop(self) -> AbstractAsyncContextManager[None]:
        return self._stops
