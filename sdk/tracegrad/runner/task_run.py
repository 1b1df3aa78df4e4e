"""A run over tasks: epochs of groups, its record, and what an interrupted one left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tracegrad.context import proxy_url
from tracegrad.events import Outcome, RolloutFinished
from tracegrad.exporter import exporter
from tracegrad.runner.attempt import (
    Attempt,
    AttemptObserver,
    AttemptSettings,
    Prepare,
    run_attempt,
)
from tracegrad.runner.driver import Driver, Pace, RunObserver, TrainerPace, unpaced
from tracegrad.runner.local_process import kill_marked
from tracegrad.runner.quarantine_watch import QuarantineWatch
from tracegrad.runner.run_record import RunRecord
from tracegrad.runner.sandbox import SandboxBackend
from tracegrad.runner.scheduler import GroupKey, GroupPlan, Scheduler, SchedulerSettings, Ticket
from tracegrad.runner.stage_limits import StageLimits, StageTimeouts
from tracegrad.runner.task import Task

log = logging.getLogger("tracegrad.runner")

# Sandboxes that start, or wait for an agent's place, beside the agents that run.
MOST_AHEAD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """
    Attributes:
        attempts, over_sample, retries: as of `SchedulerSettings`.
        concurrency: agents that run at once.
        epochs: how often each task is a group.
        held_out: rollouts are never trained, by mark, and wait for no trainer.
        stagger_s: between the starts of two sandboxes.
    """

    attempts: int = 1
    over_sample: int = 0
    concurrency: int = 8
    epochs: int = 1
    retries: int = 2
    held_out: bool = False
    timeouts: StageTimeouts = field(default_factory=StageTimeouts)
    stagger_s: float = 0.0


class TaskRun:
    """Tasks that are commands or agents' recipes.

    Args:
        record: None: nobody will go on with it.
        quarantine: leaves out tasks of the epochs that are to come; None: none is.
        not_needed: gets the number of attempts that are not made because of that.
        said: gets lines about what is waited for.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        settings: RunSettings,
        backend: SandboxBackend,
        *,
        logs: Path,
        record: RunRecord | None = None,
        prepare: Prepare | None = None,
        observer: RunObserver | None = None,
        quarantine: QuarantineWatch | None = None,
        not_needed: Callable[[int], object] = lambda attempts: None,
        echo: Callable[[bytes], object] | None = None,
        said: Callable[[str], object] = log.info,
    ) -> None:
        self._tasks = {task.id: task for task in tasks}
        self._settings, self._backend, self._record = settings, backend, record
        self._quarantine, self._not_needed = quarantine, not_needed
        limits = StageLimits(settings.concurrency, stagger_s=settings.stagger_s)
        self._of_attempts = AttemptSettings(
            backend=backend,
            logs=logs,
            limits=limits,
            timeouts=settings.timeouts,
            prepare=prepare,
            held_out=settings.held_out,
            echo=echo,
        )
        self.scheduler = Scheduler(
            self._plans(),
            SchedulerSettings(
                attempts=settings.attempts,
                over_sample=settings.over_sample,
                agents=settings.concurrency,
                ahead=min(settings.concurrency, MOST_AHEAD),
                retries=settings.retries,
            ),
        )
        # The record before the others: they may fail.
        observers = [each for each in (record, observer, quarantine) if each is not None]
        pace: Pace = unpaced if settings.held_out else TrainerPace(said)
        self._driver = Driver(
            self.scheduler, self._execute, pace=pace, observer=Observers(observers)
        )

    async def run(self) -> None:
        """Until it is over. A cancellation aborts what runs, and is raised; what the proxy refuses
        is raised (ProxyRefused)."""
        watching = None
        if self._quarantine is not None:
            watching = asyncio.create_task(self._quarantine.watch())
        try:
            await self._driver.run()
        finally:
            if watching is not None:
                watching.cancel()
            await self._backend.close()

    def _plans(self) -> Iterator[GroupPlan]:
        for epoch in range(self._settings.epochs):
            for task_id in self._tasks:
                key = GroupKey(epoch, task_id)
                ended = () if self._record is None else self._record.ended_of(key)
                if self._quarantine is None or self._quarantine.why(task_id) is None:
                    yield GroupPlan(key, ended)
                else:
                    scored = sum(outcome.scored for outcome in ended)
                    self._not_needed(max(0, self._settings.attempts - scored))

    async def _execute(self, ticket: Ticket, observer: AttemptObserver) -> Attempt:
        return await run_attempt(self._tasks[ticket.group.task_id], self._of_attempts, observer)


class Observers(RunObserver):
    """Several as one, in their order."""

    def __init__(self, observers: Sequence[RunObserver]) -> None:
        self._observers = observers

    def begun(self, ticket: Ticket, rollout_id: str) -> None:
        for each in self._observers:
            each.begun(ticket, rollout_id)

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        for each in self._observers:
            each.ended(ticket, attempt)


def settle_lost(rollout_ids: Sequence[str]) -> None:
    """Of a runner that was killed: its agents' processes are ended, and its rollouts aborted. The
    first end of a rollout stands, so that one whose end was said already keeps it."""
    for rollout_id in rollout_ids:
        kill_marked(f"/rollouts/{rollout_id}/")
        said = RolloutFinished(
            rollout_id=rollout_id, outcome=Outcome.ABORTED, error="its runner was killed"
        )
        exporter(proxy_url()).put(said)
