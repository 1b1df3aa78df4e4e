"""The driver: attempts as tasks of a loop, and how those end that are cut, fail or are stopped."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from tracegrad.events import Outcome
from tracegrad.intake_client import Intake, IntakeView
from tracegrad.runner import driver as driver_module
from tracegrad.runner.attempt import Attempt, AttemptObserver
from tracegrad.runner.driver import Driver, RunObserver, TrainerPace, unpaced
from tracegrad.runner.scheduler import GroupKey, GroupPlan, Scheduler, SchedulerSettings, Ticket


class Seen(RunObserver):
    def __init__(self) -> None:
        self.open: set[str] = set()
        self.attempts: list[Attempt] = []

    def begun(self, ticket: Ticket, rollout_id: str) -> None:
        self.open.add(rollout_id)

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        self.open.remove(attempt.rollout_id)
        self.attempts.append(attempt)

    @property
    def outcomes(self) -> list[str]:
        return sorted(str(attempt.outcome) for attempt in self.attempts)


class Attempts:
    """Each waits for what the test says, by the attempt's number."""

    def __init__(
        self, outcome: Callable[[Ticket], Outcome | None], *, stops_for_ever: bool = False
    ) -> None:
        """`outcome`: None: it runs for ever."""
        self._outcome, self._stops_for_ever = outcome, stops_for_ever
        self.stopping = asyncio.Semaphore(0)
        self.most = self.running = 0
        self.begun = asyncio.Semaphore(0)

    async def __call__(self, ticket: Ticket, observer: AttemptObserver) -> Attempt:
        rollout_id = f"{ticket.group.task_id}-{ticket.number}"
        observer.opened(rollout_id)
        observer.sandbox_tried(True)
        observer.agent_began()
        self.running += 1
        self.most = max(self.most, self.running)
        self.begun.release()
        try:
            outcome = self._outcome(ticket)
            for _ in range(50):  # others begin meanwhile
                await asyncio.sleep(0)
            if outcome is None:
                await asyncio.Event().wait()
            assert outcome is not None
        finally:
            self.running -= 1
            observer.agent_ended()
        attempt = Attempt(
            rollout_id=rollout_id, task_id=ticket.group.task_id, outcome=outcome, reason=None
        )
        observer.finished(attempt)
        self.stopping.release()
        if self._stops_for_ever:
            await asyncio.Event().wait()
        return attempt


def driver(
    execute: Attempts, seen: Seen, *tasks: str, pace: Any = unpaced, **settings: Any
) -> Driver:
    scheduler = Scheduler(
        [GroupPlan(GroupKey(0, task)) for task in tasks],
        SchedulerSettings(**{"ahead": 0, "first_delay_s": 0.0, **settings}),
        random.Random(0),
    )
    return Driver(scheduler, execute, pace=pace, observer=seen)


async def test_all_groups_are_made_within_concurrency() -> None:
    seen, attempts = Seen(), Attempts(lambda _: Outcome.COMPLETED)
    await driver(attempts, seen, *"abcdefgh", attempts=4, agents=3).run()
    assert seen.outcomes == ["completed"] * 32
    assert attempts.most == 3
    assert not seen.open


async def test_failures_are_replaced_until_groups_are_filled() -> None:
    def outcome(ticket: Ticket) -> Outcome:
        return Outcome.INFRA_ERROR if ticket.number % 2 else Outcome.COMPLETED

    seen = Seen()
    some = driver(Attempts(outcome), seen, "a", "b", attempts=3, retries=2)
    await some.run()
    assert some.scheduler.counts.filled == 2
    assert seen.outcomes.count("completed") == 6
    assert seen.outcomes.count("infra_error") == some.scheduler.counts.replaced >= 4


async def test_stragglers_are_cut_and_counted_as_aborted() -> None:
    seen = Seen()
    attempts = Attempts(lambda ticket: Outcome.COMPLETED if ticket.number > 1 else None)
    some = driver(attempts, seen, "a", attempts=2, over_sample=2)
    await some.run()
    assert seen.outcomes == ["aborted", "aborted", "completed", "completed"]
    cut = [one for one in seen.attempts if one.outcome is Outcome.ABORTED]
    assert {one.rollout_id for one in cut} == {"a-0", "a-1"}
    assert all(one.reason is not None and "had ended before" in one.reason for one in cut)
    assert attempts.running == 0


async def test_an_interrupt_aborts_what_runs_and_is_raised() -> None:
    seen, attempts = Seen(), Attempts(lambda _: None)
    running = asyncio.create_task(driver(attempts, seen, "a", attempts=3).run())
    for _ in range(3):
        await attempts.begun.acquire()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert seen.outcomes == ["aborted"] * 3
    assert [one.reason for one in seen.attempts] == ["interrupted"] * 3


async def test_a_stop_ends_the_run_also_while_it_waits_for_the_trainer() -> None:
    seen, attempts, asked = Seen(), Attempts(lambda _: None), 0
    waiting = asyncio.Event()

    async def pace() -> str | None:
        nonlocal asked
        asked += 1
        if asked == 3:
            waiting.set()
            await asyncio.Event().wait()
        return f"place-{asked}"

    some = driver(attempts, seen, "a", "b", attempts=2, pace=pace)
    running = asyncio.create_task(some.run())
    await waiting.wait()
    for _ in range(2):
        await attempts.begun.acquire()
    some.stop("enough")
    await running
    assert [one.reason for one in seen.attempts] == ["enough"] * 2
    assert some.scheduler.is_done


async def test_a_long_wait_for_the_trainer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing would be on the screen, and nobody knew why."""
    room, said = asyncio.Event(), list[str]()
    was_said = asyncio.Event()

    async def intake(rollouts: int) -> Intake:
        await room.wait()
        return Intake(rollouts, 1.0, True, 3, ("r",))

    def hear(line: str) -> None:
        said.append(line)
        was_said.set()

    view = IntakeView(True, 2, 3, "2 of 2 groups wait to be trained")
    monkeypatch.setattr(driver_module, "intake", intake)
    monkeypatch.setattr(driver_module, "read_intake", lambda: view)
    monkeypatch.setattr(driver_module, "_SAY_AFTER_S", 0.01)
    asking = asyncio.ensure_future(TrainerPace(hear)())
    await was_said.wait()
    room.set()
    assert await asking == "r"
    assert said == ["waiting for the trainer: 2 of 2 groups wait to be trained"]


async def test_what_the_pace_raises_ends_the_run() -> None:
    async def pace() -> str | None:
        raise ValueError("TRACEGRAD_URL: wrong")

    with pytest.raises(ValueError, match="TRACEGRAD_URL"):
        await driver(Attempts(lambda _: Outcome.COMPLETED), Seen(), "a", pace=pace).run()


async def test_an_interrupt_while_its_sandbox_stops_leaves_an_attempt_as_it_ended() -> None:
    seen, attempts = Seen(), Attempts(lambda _: Outcome.COMPLETED, stops_for_ever=True)
    running = asyncio.create_task(driver(attempts, seen, "a").run())
    await attempts.stopping.acquire()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert seen.outcomes == ["completed"]
