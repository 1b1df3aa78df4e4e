"""Starts and stops of containers: so many at a time, and one a moment.

A hundred at one moment make an engine time out. Those that a warm pool makes ahead count, too,
which no attempt waits for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

STAGGER_S = 0.05  # between two starts
STARTS, STOPS = 2 * (os.cpu_count() or 1), 4 * (os.cpu_count() or 1)


class StartLimits:
    """Of one engine; all on one event loop."""

    def __init__(
        self, *, starts: int = STARTS, stops: int = STOPS, stagger_s: float = STAGGER_S
    ) -> None:
        self._starts, self._stops = asyncio.Semaphore(starts), asyncio.Semaphore(stops)
        self._stagger_s, self._next = stagger_s, 0.0

    @asynccontextmanager
    async def start(self) -> AsyncIterator[None]:
        async with self._starts:
            now = asyncio.get_running_loop().time()
            begin = max(now, self._next)
            self._next = begin + self._stagger_s
            await asyncio.sleep(begin - now)
            yield

    def stop(self) -> AbstractAsyncContextManager[None]:
        return self._stops
