"""Rollouts that are written down before: what each turn's environment takes, and the engine that
all of them share."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

FASTEST_S, SLOWEST_S = 0.1, 30.0
MEDIAN_S, SPREAD = 1.0, 1.3  # of a lognormal distribution; it is cut at both ends
TURNS = (1, 6)
REPLY_S = 0.5  # of the engine, whatever else it does
SLOTS = 16  # replies that the engine works on at once
# As fast as the clock is made to run: seconds above become so many.
SCALE = 0.1


@dataclass(frozen=True, slots=True)
class Rollout:
    """`steps`: seconds of its environment's, a turn each."""

    group: int
    steps: tuple[float, ...]


def workload(groups: int, group_size: int, *, seed: int = 0) -> list[Rollout]:
    rng = random.Random(f"rollouts {seed}")
    return [
        Rollout(group, tuple(_step(rng) for _ in range(rng.randint(*TURNS))))
        for group in range(groups)
        for _ in range(group_size)
    ]


def _step(rng: random.Random) -> float:
    return min(SLOWEST_S, max(FASTEST_S, rng.lognormvariate(math.log(MEDIAN_S), SPREAD)))


class Engine:
    """Replies after REPLY_S, to SLOTS calls at once. Seconds are scaled."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._free = asyncio.Semaphore(SLOTS)
        self.busy_s = 0.0  # of all slots
        self.calls = 0

    async def reply(self) -> None:
        async with self._free:
            began = time.monotonic()
            await asyncio.sleep(REPLY_S * self.scale)
            self.busy_s += time.monotonic() - began
            self.calls += 1

    async def turn(self, step_s: float) -> None:
        """A reply, and what the environment makes of it."""
        await self.reply()
        await asyncio.sleep(step_s * self.scale)

    async def play(self, rollout: Rollout) -> None:
        for step_s in rollout.steps:
            await self.turn(step_s)


def busiest(rollouts: Sequence[Rollout], concurrency: int) -> float:
    """Seconds, not scaled, below which no schedule comes: of the engine's slots, or of so many
    rollouts at once."""
    engine_s = sum(len(rollout.steps) for rollout in rollouts) * REPLY_S / SLOTS
    rollouts_s = sum(sum(r.steps) + REPLY_S * len(r.steps) for r in rollouts) / concurrency
    return max(engine_s, rollouts_s)
