"""`make bench-rollouts`: what each schedule waits for; its page, of figures that were made up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from bench.rollouts import schedules
from bench.rollouts.commands import Ended, Many, sleepers
from bench.rollouts.containers import Containers
from bench.rollouts.report import BARRIER, RUNNER, Found, goals, growth, page
from bench.rollouts.schedules import Measured
from bench.rollouts.workload import FASTEST_S, SLOWEST_S, Engine, Rollout, workload

from tracegrad.events import Outcome

ROLLOUTS = [Rollout(number // 2, (float(number),)) for number in range(12)]


class Held(Engine):
    """Its first rollout does not end before it may."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.begun: list[float] = []
        self.at_once = self.most_at_once = 0
        self.free = asyncio.Event()

    async def turn(self, step_s: float) -> None:
        self.begun.append(step_s)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if step_s == 0:
            await self.free.wait()
        await super().turn(step_s)
        self.at_once -= 1


async def begun_beside_a_slow_one(schedule: schedules.Schedule) -> Sequence[float]:
    engine = Held()
    running = asyncio.create_task(schedule(ROLLOUTS, engine, 4))
    for _ in range(500):
        await asyncio.sleep(0)
    seen = list(engine.begun)
    engine.free.set()
    await running
    assert sorted(engine.begun) == [rollout.steps[0] for rollout in ROLLOUTS]
    assert engine.most_at_once <= 4
    return seen


@pytest.mark.parametrize("schedule", [schedules.lockstep, schedules.gathered])
async def test_a_barrier_waits_for_the_slowest(schedule: schedules.Schedule) -> None:
    seen = await begun_beside_a_slow_one(schedule)
    assert seen == [0, 1, 2, 3]


async def test_the_runner_goes_on_beside_the_slowest() -> None:
    seen = await begun_beside_a_slow_one(schedules.runner)
    assert len(seen) == len(ROLLOUTS)


async def test_rates_are_in_the_workloads_own_minutes() -> None:
    rollouts = workload(2, 4)
    found = await schedules.measure("x", schedules.gathered, rollouts, 8, 0.001)
    assert found.per_minute == pytest.approx(8 / (found.seconds / 0.001) * 60)
    assert 0 < found.idle < 1


def test_a_workload_is_long_tailed_and_always_the_same() -> None:
    steps = [step for rollout in workload(100, 8) for step in rollout.steps]
    assert workload(100, 8) == workload(100, 8)
    assert min(steps) == FASTEST_S
    assert max(steps) == SLOWEST_S
    assert sorted(steps)[len(steps) // 2] < sum(steps) / len(steps) / 1.5
    assert sleepers([Rollout(0, (0.2, 0.3))], 2.0)[0][0].command == ("sleep", "1.0")


def many(overhead_s: float, rss: Sequence[float], outcome: Outcome = Outcome.COMPLETED) -> Many:
    ended = [Ended(outcome, overhead_s, {"process": overhead_s, "other": 0.0}) for _ in rss]
    return Many({}, ended_=ended, rss_mib=list(rss), most_at_once=20, seconds=2.0)


def measured(name: str, per_minute: float) -> Measured:
    return Measured(name, 64, 1.0, per_minute, 0.5)


TAILED = many(0.3, [40.0] * 20)
TAILED.ended_[-1] = replace(TAILED.ended_[-1], overhead_s=3.0)
FOUND = Found(
    rounds=[{BARRIER: measured(BARRIER, 100.0), RUNNER: measured(RUNNER, 260.0)}],
    concurrency=8,
    scale=0.1,
    load=0.5,
    single=many(0.02, [40.0] * 10),
    many=many(0.2, [40.0] * 20),
    many_at_once=20,
    containers=Containers("busybox", many(0.3, [40.0] * 10), many(0.9, [40.0] * 3)),
)


def test_goals_that_are_met() -> None:
    assert [goal.met for goal in goals(FOUND)] == [True] * 6
    said = page(FOUND)
    assert "| this runner | 64 | 260 | 260 to 260 | 50% |" in said
    assert "| processes, a few at once | 10 | 20 | 20.0 | process 20.0, other 0.00 | 20.0 |" in said
    assert "| containers, cold | 3 | 20 | 900 | process 900, other 0.00 | 900 |" in said


def test_without_an_engine_the_page_says_why() -> None:
    found = replace(FOUND, containers="no Docker engine at unix:///nowhere")
    assert len(goals(found)) == 4
    assert "Containers were not measured: no Docker engine at unix:///nowhere.\n" in page(found)


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"rounds": [{BARRIER: measured(BARRIER, 110.0), RUNNER: measured(RUNNER, 260.0)}]}, 0),
        ({"single": many(0.06, [40.0] * 10)}, 1),
        ({"containers": Containers("x", many(0.41, [40.0] * 10), many(0.9, [4.0] * 2))}, 2),
        ({"containers": Containers("x", TAILED, many(0.9, [4.0] * 2))}, 3),
        ({"many": many(0.2, [40.0] * 20, Outcome.INFRA_ERROR)}, 4),
        ({"many_at_once": 21}, 4),
        ({"many": many(0.2, [40.0 + number for number in range(20)])}, 5),
    ],
)
def test_goals_that_are_missed(change: dict[str, object], missed: int) -> None:
    found = replace(FOUND, **change)  # type: ignore[arg-type]
    assert [goal.met for goal in goals(found)] == [number != missed for number in range(6)]
    assert "**no**" in page(found)


def test_memory_is_compared_with_what_it_was_when_all_had_begun() -> None:
    assert growth(many(0.1, [10.0, 10.0, 30.0, 30.0, 30.0, 30.0, 30.0, 30.0, 31.0, 31.0])) == 1.0
