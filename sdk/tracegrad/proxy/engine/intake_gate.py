"""Pacing of calls (`pace_calls`): the first call of a rollout waits while the intake is full.

For agents whose driver does not ask for places. A rollout that has begun is never held back, nor
one that training does not select, nor a call that names none. Rollouts wait in the order in which
they came; one that has waited for `max_wait_s` begins all the same: nothing is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from cachetools import LRUCache

from tracegrad.proxy.engine.fair_queue import FairQueue, QueueFull
from tracegrad.proxy.store_async import run_in_thread
from tracegrad.store.errors import StoreError
from tracegrad.store.ledger.intake import IntakeState

log = logging.getLogger("tracegrad.proxy")

# Rollouts whose first call is known to have begun; of others the store is asked once more.
MOST_BEGUN = 16_384
# An SDK sends a rollout's opening beside its first call: so long that may take.
OPENING_S = 1.0
_OPENING_TICK_S = 0.05
# Between two looks at the intake.
_LOOK_S = 0.25


class IntakeOfCalls(Protocol):
    """What `tracegrad.store.ledger.intake.Intake` does of it."""

    def is_opened(self, rollout_id: str) -> bool: ...

    def needs_place(self, rollout_id: str) -> bool: ...

    def begin(self, rollout_id: str, *, waited_s: float = 0.0) -> IntakeState: ...


class Counts(Protocol):
    """What `tracegrad.proxy.metrics.counters.ProxyMetrics` does of it."""

    def add(self, name: str, *labels: str, number: float = 1.0) -> None: ...


class IntakeGate:
    """Of one worker; that of all its calls. Not thread-safe: everything runs on one event loop."""

    def __init__(
        self,
        intake: IntakeOfCalls,
        metrics: Counts,
        *,
        max_waiting: int,
        max_wait_s: float,
        remembered: int = MOST_BEGUN,
    ) -> None:
        """`remembered`: rollouts that are known to have begun."""
        self._intake = intake
        self._metrics = metrics
        self._max_wait_s = max_wait_s
        self._begun: LRUCache[str, None] = LRUCache(remembered)
        self._since: dict[str, float] = {}  # of rollouts that wait, by the monotonic clock
        self._waiting = FairQueue(max_waiting)
        self._looking: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Calls that wait."""
        return len(self._waiting)

    async def enter(self, rollout_id: str | None) -> None:
        """Returns when the rollout may have its call. Never raises for want of room."""
        if rollout_id is None or rollout_id in self._begun:
            return
        if rollout_id not in self._since and await self._is_free(rollout_id):
            return
        began = self._since.setdefault(rollout_id, time.monotonic())
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        try:
            await self._waiting.wait(rollout_id, began + self._max_wait_s - time.monotonic())
        except (TimeoutError, QueueFull):
            self._begin_anyway(rollout_id)
        finally:
            if not self._waiting.holds(rollout_id):
                self._since.pop(rollout_id, None)

    async def _is_free(self, rollout_id: str) -> bool:
        """Whether it need not wait: there is room and nobody before it, or it needs none."""
        if self._waiting.first is None:
            return await self._may_begin(rollout_id, 0.0)
        try:
            await self._await_opening(rollout_id)
            return not await run_in_thread(self._intake.needs_place, rollout_id)
        except StoreError:
            return False  # who is asked next says why

    async def _may_begin(self, rollout_id: str, waited_s: float) -> bool:
        """Whether it may; its place is taken then."""
        try:
            await self._await_opening(rollout_id)
            state = await run_in_thread(self._intake.begin, rollout_id, waited_s=waited_s)
        except StoreError as error:
            log.warning("a rollout begins without a place: %s", error)
            self._begun[rollout_id] = None
            return True
        if state.reason:
            return False
        self._begun[rollout_id] = None
        if state.paced:
            self._metrics.add("paced_rollouts_total", "placed")
            self._metrics.add("intake_waited_seconds_total", number=waited_s)
        return True

    async def _await_opening(self, rollout_id: str) -> None:
        """Until it says of which tags the rollout is; a rollout may have none."""
        until = time.monotonic() + OPENING_S
        while not await run_in_thread(self._intake.is_opened, rollout_id):
            if time.monotonic() >= until:
                return
            await asyncio.sleep(_OPENING_TICK_S)

    async def _look(self) -> None:
        """As long as somebody waits: the one that came first begins when there is room."""
        try:
            while (rollout_id := self._waiting.first) is not None:
                waited_s = time.monotonic() - self._since.get(rollout_id, time.monotonic())
                # Another call of it may have begun it meanwhile.
                if rollout_id in self._begun or await self._may_begin(rollout_id, waited_s):
                    self._waiting.release_key(rollout_id)
                else:
                    await asyncio.sleep(_LOOK_S)
        finally:
            self._looking = None

    def _begin_anyway(self, rollout_id: str) -> None:
        self._begun[rollout_id] = None
        self._waiting.release_key(rollout_id)
        self._metrics.add("paced_rollouts_total", "let_in")
