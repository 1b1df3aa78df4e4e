"""Sends an agent to work, the shop's or another example's: tasks become rollouts, answers become
rewards."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from openai import APIConnectionError, InternalServerError

from tracegrad import Outcome, Rollout, rollout

from .tasks import Split

T = TypeVar("T")


class Task(Protocol):
    """`task_id` is the same for the same question; `split` says who may see it."""

    @property
    def task_id(self) -> str: ...
    @property
    def split(self) -> Split: ...
    @property
    def question(self) -> str: ...
    def reward(self, answer: Any) -> float:
        """Of what the agent came to; None: it used up its turns."""
        ...


AnyTask = TypeVar("AnyTask", bound=Task)
Tags = Mapping[str, str]
# Question and temperature -> what the agent came to.
Answer = Callable[[str, float], Awaitable[object | None]]
# Task, temperature and tags -> a rollout, and the reward it deserves; giving it is the caller's.
Attempt = Callable[[Any, float, Tags], Coroutine[Any, Any, tuple[Rollout, float]]]

ATTEMPTS = 3  # at one rollout, when it is the serving side that fails


@dataclass(frozen=True, slots=True)
class Score:
    """So many rollouts succeeded, of so many."""

    successes: int
    rollouts: int

    @property
    def rate(self) -> float:
        """Share of successes; 0 when nothing was tried."""
        return self.successes / self.rollouts if self.rollouts else 0.0

    @property
    def error(self) -> float:
        """Standard error of `rate`, by Agresti and Coull: not zero for 0 or all successes."""
        tried = self.rollouts + 4
        rate = (self.successes + 2) / tried
        return math.sqrt(rate * (1 - rate) / tried)

    def __str__(self) -> str:
        return f"{self.rate:.3f} ± {self.error:.3f}"


@dataclass(frozen=True, slots=True)
class Group(Generic[AnyTask]):
    """One training task, attempted several times."""

    task: AnyTask
    successes: tuple[float, ...]  # what each attempt deserved; a control may have given others


def attempts_of(name: str, answer: Answer) -> Attempt:
    """Of an agent in this process.

    A failure of the serving side is not the agent's: the rollout ends as `infra_error` and
    another one takes its place, up to ATTEMPTS in all. Raises the last failure.
    """

    async def attempt(task: Task, temperature: float, tags: Tags) -> tuple[Rollout, float]:
        tags = {"split": task.split, **tags}
        for left in reversed(range(ATTEMPTS)):
            async with rollout(task.task_id, tags=tags, agent=name, input=task.question) as opened:
                try:
                    found = await answer(task.question, temperature)
                except (APIConnectionError, InternalServerError) as error:
                    opened.finish(Outcome.INFRA_ERROR, str(error))
                    if not left:
                        raise
                    continue
                if found is None:
                    opened.finish(Outcome.BUDGET)
            return opened, task.reward(found)
        raise AssertionError("the last attempt returns or raises")

    return attempt


async def attempt_group(
    attempt: Attempt, task: AnyTask, *, samples: int, tags: Tags, shuffle: random.Random | None
) -> Group[AnyTask]:
    """`samples` rollouts of one task at temperature 1, rewarded when all of them are done."""
    done = await _together(attempt(task, 1.0, tags) for _ in range(samples))
    successes = [success for _, success in done]
    given = shuffle.sample(successes, len(successes)) if shuffle else successes
    for (opened, _), reward in zip(done, given, strict=True):
        opened.reward(reward)
    return Group(task, tuple(successes))


async def train(
    attempt: Attempt,
    tasks: Iterable[AnyTask],
    *,
    samples: int = 8,
    concurrency: int = 64,
    tags: Tags | None = None,
    shuffle_rewards: int | None = None,
    permit: Callable[[], Awaitable[object]] | None = None,
) -> AsyncIterator[Group[AnyTask]]:
    """Attempts task after task, several at a time, and yields each group when it is done.

    Args:
        tasks: may be endless; close the iterator when enough has been learnt.
        samples: rollouts of each task.
        concurrency: rollouts under way at a time, at most; whole groups only, at least one.
        tags: of every rollout, besides its split.
        shuffle_rewards: a control. Seeds a generator that permutes the rewards among the
            rollouts of a group before they are given, so that they say nothing any more.
        permit: awaited before each group begins; holds the driver back while the trainer is
            behind.

    Raises what an attempt raises, after all others were stopped.
    """
    shuffle = None if shuffle_rewards is None else random.Random(shuffle_rewards)
    source = iter(tasks)
    finished: asyncio.Queue[Group[AnyTask] | None] = asyncio.Queue()

    async def work() -> None:
        while True:
            if permit:
                await permit()
            if (task := next(source, None)) is None:
                return
            group = await attempt_group(
                attempt, task, samples=samples, tags=tags or {}, shuffle=shuffle
            )
            await finished.put(group)

    async def everyone() -> None:
        try:
            await _together(work() for _ in range(max(1, concurrency // samples)))
        finally:
            finished.put_nowait(None)

    working = asyncio.create_task(everyone())
    try:
        while (group := await finished.get()) is not None:
            yield group
        await working
    finally:
        working.cancel()
        await asyncio.wait([working])


async def evaluate(
    attempt: Attempt,
    tasks: Sequence[AnyTask],
    temperature: float,
    split: Split,
    *,
    concurrency: int = 32,
    tags: Tags | None = None,
    progress: Callable[[Score], None] | None = None,
) -> Score:
    """Attempts every task once and tells how many came out right.

    The rollouts are recorded, rewarded and tagged with `split`, so that a trainer which takes
    the train split only leaves them alone. `progress` gets the score so far, task by task.

    Raises ValueError if a task is not of `split`, and what an attempt raises.
    """
    if wrong := [task.task_id for task in tasks if task.split != split]:
        raise ValueError(f"tasks: {wrong[0]} is not of the split {split!r}")
    free = asyncio.Semaphore(concurrency)
    score = Score(0, 0)

    async def one(task: AnyTask) -> None:
        nonlocal score
        async with free:
            opened, success = await attempt(task, temperature, tags or {})
        opened.reward(success)
        score = Score(score.successes + int(success), score.rollouts + 1)
        if progress:
            progress(score)

    await _together(one(task) for task in tasks)
    return score


async def _together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, in order; the first failure stops the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in running]
