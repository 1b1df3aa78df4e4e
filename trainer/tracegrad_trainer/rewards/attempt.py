"""One scoring as several attempts: how long each may take, how often, and how many at a time."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Pauses between attempts double, and differ by chance: what was too much at once is not again.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
# A server that asks for longer is asked again after that.
LONGEST_ASKED_S = 900.0


class AttemptFailed(Exception):
    """In one line. `final`: another attempt would fail as well; `after_s`: nor would any other of
    this scorer before that."""

    def __init__(self, line: str, *, final: bool = False, after_s: float = 0.0) -> None:
        super().__init__(line)
        self.final = final
        self.after_s = after_s


@dataclass(frozen=True, slots=True)
class Attempts(Generic[T]):
    """What came of them: a result, or the last one's error."""

    result: T | None
    error: str | None
    count: int
    seconds: float


@dataclass(slots=True)
class RateLimit:
    """So many beginnings a minute, evenly spread; None: any number. None at all while a server
    wants to be left alone."""

    per_minute: float | None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _next: float = field(default=float("-inf"), init=False)
    _closed_until: float = field(default=float("-inf"), init=False)

    async def wait(self) -> None:
        if self.per_minute is not None:
            now = self.clock()
            at = max(now, self._next)
            self._next = at + 60 / self.per_minute
            if at > now:
                await self.sleep(at - now)
        while (left_s := self._closed_until - self.clock()) > 0:
            await self.sleep(left_s)

    def close(self, seconds: float) -> None:
        """Whoever asks meanwhile would be refused, and lose an attempt by it."""
        self._closed_until = max(self._closed_until, self.clock() + seconds)


@dataclass(slots=True)
class AttemptPolicy:
    """Of one scorer."""

    retries: int
    limit: RateLimit
    slots: asyncio.Semaphore
    first_pause_s: float = FIRST_PAUSE_S
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def run(self, attempt: Callable[[int], Awaitable[T]]) -> Attempts[T]:
        """`attempt` gets its number, from 0, and raises AttemptFailed."""
        began = time.monotonic()
        for number in range(self.retries + 1):
            try:
                async with self.slots:
                    await self.limit.wait()
                    result = await attempt(number)
                return Attempts(result, None, number + 1, time.monotonic() - began)
            except AttemptFailed as error:
                failed = error
            asked_s = min(failed.after_s, LONGEST_ASKED_S)
            if asked_s > 0:
                logger.warning("%s; nothing is asked of it for %.0f s", failed, asked_s)
                self.limit.close(asked_s)
            if failed.final or number == self.retries:
                break
            await self.sleep(max(self.pause_s(number), asked_s))
        return Attempts(None, str(failed), number + 1, time.monotonic() - began)

    def pause_s(self, number: int) -> float:
        """Behind the attempt of that number: half of it at least, the rest by chance."""
        pause = min(self.first_pause_s * 2.0 ** min(number, 10), LONGEST_PAUSE_S)
        return pause * random.uniform(0.5, 1.0)
