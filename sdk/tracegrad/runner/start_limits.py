"""Starts and stops of sandboxes: so many at a time, one a moment, none while most fail."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tracegrad.runner.sandbox import BrokenEnvironment, SandboxUnavailable
from tracegrad.runner.start_breaker import StartBreaker

log = logging.getLogger("tracegrad.runner")

STAGGER_S = 0.05  # between two starts: a hundred at one moment make an engine time out
STARTS, STOPS = 2 * (os.cpu_count() or 1), 4 * (os.cpu_count() or 1)


class StartLimits:
    def __init__(
        self,
        *,
        starts: int = STARTS,
        stops: int = STOPS,
        stagger_s: float = STAGGER_S,
        breaker: StartBreaker | None = None,
    ) -> None:
        self._starts, self._stops = asyncio.Semaphore(starts), asyncio.Semaphore(stops)
        self._stagger_s, self._next = stagger_s, 0.0
        self.breaker = breaker or StartBreaker()

    @asynccontextmanager
    async def start(self) -> AsyncIterator[None]:
        """Around one start. Whether it fails, and by whose doing, is seen by what it raises."""
        async with self._starts:
            await self._wait()
            try:
                yield
            except SandboxUnavailable as error:
                was_open = self.breaker.is_open
                self.breaker.took(False, time.monotonic())
                if self.breaker.is_open and not was_open:
                    log.warning("most sandboxes fail to start, and starts pause: %s", error)
                raise
            except BrokenEnvironment:
                self.breaker.took(True, time.monotonic())  # the engine is well
                raise
            except BaseException:
                self.breaker.gave_up()
                raise
            else:
                self.breaker.took(True, time.monotonic())

    @asynccontextmanager
    async def stop(self) -> AsyncIterator[None]:
        async with self._stops:
            yield

    async def _wait(self) -> None:
        while (delay := self.breaker.delay(time.monotonic())) > 0:  # noqa: ASYNC110 (a clock)
            await asyncio.sleep(delay)
        now = time.monotonic()
        turn = self._next = max(now, self._next + self._stagger_s)
        try:
            await asyncio.sleep(turn - now)
        except asyncio.CancelledError:
            self.breaker.gave_up()
            raise
