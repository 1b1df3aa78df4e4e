"""Carries out what the scheduler says: attempts as tasks of one event loop, paced by a trainer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from tracegrad.events import Outcome
from tracegrad.intake_client import Intake, intake, read_intake, use_place
from tracegrad.runner.attempt import Attempt, AttemptObserver
from tracegrad.runner.scheduler import Scheduler, Ticket
from tracegrad.transport import ProxyRefused, ProxyUnreachable

log = logging.getLogger("tracegrad.runner")

# Makes one attempt. A cancellation ends it as aborted, and is raised.
Execute = Callable[[Ticket, AttemptObserver], Awaitable[Attempt]]

# So long a proxy without a trainer is not asked again.
_UNPACED_S = 5.0
# A wait is said after so long, and no other one for a while.
_SAY_AFTER_S, _SAY_AGAIN_S = 10.0, 60.0
_CUT = "the attempts that its group needs had ended before it"


# Waits until one more rollout may be opened; the id to open it under, None: any.
Pace = Callable[[], Awaitable[str | None]]


class TrainerPace:
    """By the trainer, where one runs (`/api/intake`). `said`: gets a line about a long wait.

    Attributes:
        waited_s: in all.
        latest: the proxy's last answer.
    """

    def __init__(self, said: Callable[[str], object] = log.info) -> None:
        self.waited_s = 0.0
        self.latest: Intake | None = None
        self._ask_again = 0.0
        self._said, self._say_again = said, 0.0

    async def __call__(self) -> str | None:
        """Raises ProxyRefused, ValueError."""
        known = self.latest is not None and not self.latest.paced
        if known and time.monotonic() < self._ask_again:
            return None
        asking = asyncio.ensure_future(intake(1))
        try:
            await asyncio.wait({asking}, timeout=_SAY_AFTER_S)
            if not asking.done():
                await self._say()
            self.latest = await asking
        finally:
            asking.cancel()
        self.waited_s += self.latest.waited_s
        self._ask_again = time.monotonic() + _UNPACED_S
        return self.latest.rollout_ids[0]

    async def _say(self) -> None:
        """Not of a proxy that is away: `intake` warns of that."""
        if time.monotonic() < self._say_again:
            return
        with suppress(ProxyUnreachable, ProxyRefused):
            if reason := (await asyncio.to_thread(read_intake)).reason:
                self._say_again = time.monotonic() + _SAY_AGAIN_S
                self._said(f"waiting for the trainer: {reason}")


async def unpaced() -> None:
    """For held-out rollouts: they are never trained, and take nobody's place."""


class RunObserver:
    """What is told of a run; does nothing by itself."""

    def begun(self, ticket: Ticket, rollout_id: str) -> None:
        """Before anything of it runs."""

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        """It has its outcome; cut ones, too."""


class Driver:
    """One run. `stop` ends it early."""

    def __init__(
        self,
        scheduler: Scheduler,
        execute: Execute,
        *,
        pace: Pace | None = None,
        observer: RunObserver | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._execute = execute
        self._pace = pace or TrainerPace()
        self._observer = observer or RunObserver()
        self._tasks: dict[Ticket, asyncio.Task[Attempt]] = {}
        self._open: dict[Ticket, str | None] = {}  # that have no outcome: their rollouts
        self._why: dict[Ticket, str] = {}  # they are cut
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Until all groups are over. A cancellation aborts what runs, and is raised; so is what the
        proxy refuses."""
        try:
            async with asyncio.TaskGroup() as group:
                while not self.scheduler.is_done:
                    ticket = self.scheduler.next(time.monotonic())
                    if ticket is None:
                        await self._wait()
                    else:
                        await self._begin(ticket, group)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def stop(self, why: str) -> None:
        """Nothing begins any more, and what runs is aborted."""
        self._cut(self.scheduler.stop(), why)
        self._changed.set()

    async def _begin(self, ticket: Ticket, group: asyncio.TaskGroup) -> None:
        self._open[ticket] = None
        place = await self._placed(ticket)
        if ticket in self._why:
            self._leave(ticket)
            return
        task = group.create_task(self._attempt(ticket, place))
        self._tasks[ticket] = task
        # Not a `finally`: a task that is cancelled before its first step runs no code.
        task.add_done_callback(lambda _: self._leave(ticket))

    async def _wait(self) -> None:
        now = time.monotonic()
        wake = self.scheduler.wake_at(now)
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if wake is None else max(0.0, wake - now)):
                await self._changed.wait()

    async def _placed(self, ticket: Ticket) -> str | None:
        """When the rollout may be opened, or the attempt is cut."""
        pacing = asyncio.ensure_future(self._pace())
        try:
            while not pacing.done() and ticket not in self._why:
                self._changed.clear()
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait({pacing, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            return pacing.result() if pacing.done() else None
        finally:
            pacing.cancel()

    async def _attempt(self, ticket: Ticket, place: str | None) -> Attempt:
        if place is not None:
            use_place(place)
        return await self._execute(ticket, _OfTicket(self, ticket))

    def _leave(self, ticket: Ticket) -> None:
        """Nothing of it runs any more."""
        if ticket in self._open:
            aborted = Attempt(
                rollout_id=self._open[ticket] or "",
                task_id=ticket.group.task_id,
                outcome=Outcome.ABORTED,
                reason=self._why.get(ticket, "interrupted"),
            )
            self._finish(ticket, aborted)
        self._tasks.pop(ticket, None)
        self._why.pop(ticket, None)
        self.scheduler.stopped(ticket)
        self._changed.set()

    def _finish(self, ticket: Ticket, attempt: Attempt) -> None:
        """The first end stands: a cancellation may come while the sandbox stops."""
        if ticket not in self._open:
            return
        del self._open[ticket]
        if attempt.rollout_id:
            self._observer.ended(ticket, attempt)
        cut = self.scheduler.ended(ticket, attempt.outcome, time.monotonic())
        self._cut(cut, _CUT)
        self._changed.set()

    def _cut(self, tickets: Iterable[Ticket], why: str) -> None:
        for ticket in tickets:
            self._why[ticket] = why
            if ticket in self._tasks:
                self._tasks[ticket].cancel(why)


class _OfTicket(AttemptObserver):
    """Hands on what is told of one attempt."""

    def __init__(self, driver: Driver, ticket: Ticket) -> None:
        self._driver, self._ticket = driver, ticket
        self._scheduler = driver.scheduler

    def opened(self, rollout_id: str) -> None:
        self._driver._open[self._ticket] = rollout_id
        self._driver._observer.begun(self._ticket, rollout_id)

    def sandbox_tried(self, came: bool) -> None:
        self._scheduler.sandbox_tried(self._ticket, came, time.monotonic())
        self._driver._changed.set()

    def agent_began(self) -> None:
        self._scheduler.agent_began(self._ticket)
        self._driver._changed.set()

    def agent_ended(self) -> None:
        self._scheduler.agent_ended(self._ticket)
        self._driver._changed.set()

    def finished(self, attempt: Attempt) -> None:
        self._driver._finish(self._ticket, attempt)
