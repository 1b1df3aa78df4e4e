"""One workload under four schedules, all with the same number of rollouts at once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rollouts.workload import SLOTS, Engine, Rollout
from tracegrad.events import Outcome
from tracegrad.runner.attempt import Attempt, AttemptObserver
from tracegrad.runner.driver import Driver, unpaced
from tracegrad.runner.scheduler import GroupKey, GroupPlan, Scheduler, SchedulerSettings, Ticket

Schedule = Callable[[Sequence[Rollout], Engine, int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Measured:
    """`per_minute`: rollouts in a minute of the workload's own time. `idle`: share of the time in
    which a slot of the engine had nothing to do."""

    name: str
    rollouts: int
    seconds: float  # of this machine
    per_minute: float
    idle: float


async def measure(
    name: str, schedule: Schedule, rollouts: Sequence[Rollout], concurrency: int, scale: float
) -> Measured:
    engine = Engine(scale)
    began = time.monotonic()
    await schedule(rollouts, engine, concurrency)
    seconds = time.monotonic() - began
    return _measured(name, rollouts, scale, seconds, engine.busy_s, engine.calls)


def harbor(python: Path, rollouts: Sequence[Rollout], concurrency: int, scale: float) -> Measured:
    """Harbor's queue, in the process of a Python that has it. Raises CalledProcessError."""
    work = {
        "scale": scale,
        "concurrency": concurrency,
        "rollouts": [[rollout.group, rollout.steps] for rollout in rollouts],
    }
    done = subprocess.run(
        [python, Path(__file__).with_name("harbor_queue.py")],
        input=json.dumps(work),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return _measured(
        "Harbor's queue", rollouts, scale, found["seconds"], found["busy_s"], found["calls"]
    )


def _measured(
    name: str,
    rollouts: Sequence[Rollout],
    scale: float,
    seconds: float,
    busy_s: float,
    calls: int,
) -> Measured:
    assert calls == sum(len(rollout.steps) for rollout in rollouts), "each turn was played once"
    return Measured(
        name,
        len(rollouts),
        seconds,
        len(rollouts) / (seconds / scale) * 60,
        1 - busy_s / (SLOTS * seconds),
    )


async def lockstep(rollouts: Sequence[Rollout], engine: Engine, concurrency: int) -> None:
    """Sequential batches: each turn of a batch waits for the slowest of the turn before."""
    for batch in _batches(rollouts, concurrency):
        for turn in range(max(len(rollout.steps) for rollout in batch)):
            steps = [rollout.steps[turn] for rollout in batch if turn < len(rollout.steps)]
            await asyncio.gather(*(engine.turn(step_s) for step_s in steps))


async def gathered(rollouts: Sequence[Rollout], engine: Engine, concurrency: int) -> None:
    """`asyncio.gather` of each batch: the next one waits for the slowest rollout of this one."""
    for batch in _batches(rollouts, concurrency):
        await asyncio.gather(*map(engine.play, batch))


async def runner(rollouts: Sequence[Rollout], engine: Engine, concurrency: int) -> None:
    """This runner's scheduler and driver: groups in order, the next attempt as soon as there is a
    place."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(f"task {rollout.group}", []).append(rollout)

    async def execute(ticket: Ticket, observer: AttemptObserver) -> Attempt:
        observer.opened(f"{ticket.group.task_id} {ticket.number}")
        observer.sandbox_tried(True)
        observer.agent_began()
        await engine.play(groups[ticket.group.task_id][ticket.number])
        observer.agent_ended()
        attempt = Attempt(
            rollout_id=f"{ticket.group.task_id} {ticket.number}",
            task_id=ticket.group.task_id,
            outcome=Outcome.COMPLETED,
            reason=None,
        )
        observer.finished(attempt)
        return attempt

    size = len(next(iter(groups.values())))
    scheduler = Scheduler(
        (GroupPlan(GroupKey(0, task_id)) for task_id in groups),
        SchedulerSettings(attempts=size, agents=concurrency, ahead=0),
    )
    await Driver(scheduler, execute, pace=unpaced).run()
    assert scheduler.counts.filled == len(groups)


def _batches(rollouts: Sequence[Rollout], size: int) -> list[Sequence[Rollout]]:
    return [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
