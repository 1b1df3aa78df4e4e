"""`tracegrad.run`: training tasks go to an agent that is a function, beside a trainer that serves;
held-out ones say what it was worth."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sized
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Unpack

from tracegrad import exporter
from tracegrad.context import proxy_url
from tracegrad.intake_client import IntakeView, read_intake
from tracegrad.runner.attempt import Attempt, AttemptObserver
from tracegrad.runner.driver import Driver, RunObserver, TrainerPace, unpaced
from tracegrad.runner.function_attempt import FunctionSettings, run_function
from tracegrad.runner.function_call import Agent, FunctionCall, FunctionCaller, ThreadCaller
from tracegrad.runner.learning_curve import CurvePoint, draw_learning_curve
from tracegrad.runner.quarantine_watch import QuarantineWatch
from tracegrad.runner.ray_functions import RayFunctions
from tracegrad.runner.run_record import RunHeader, RunRecord, new_run_folder
from tracegrad.runner.scheduler import GroupKey, GroupPlan, Scheduler, SchedulerSettings, Ticket
from tracegrad.runner.stage_limits import StageLimits
from tracegrad.runner.task_run import Observers, settle_lost
from tracegrad.runner.training_report import (
    Evaluation,
    EvaluationRewards,
    FirstFailures,
    RunReport,
    TrainingRewards,
    evaluation_line,
)
from tracegrad.runner.training_settings import RunOptions, TrainingSettings
from tracegrad.transport import ProxyUnreachable

log = logging.getLogger("tracegrad.runner")

_LOOK_S = 1.0  # between two looks at the policy version
_SAY_S = 10.0
PICTURE = "learning_curve.png"
# So many tasks that are left out, one after the other, are the end of them: `train` may have none.
_MOST_LEFT_OUT = 10_000


def run(agent: Agent, **options: Unpack[RunOptions]) -> RunReport:
    """Sends tasks to an agent until they are done, the trainer has made its steps, or held-out
    tasks say that it is enough. Beside `trainer serve`; without a trainer it makes rollouts.

        def solve(task):                       # sync or async; your own client, your own loop
            answer = my_agent(task["question"])
            return float(answer == task["answer"])

        report = tracegrad.run(solve, train=tasks, val=held_out, eval_every=8, stop_at=0.9)

    Args:
        agent: called with a task; what counts as its reward is said at `reward`. Where it has a
            parameter `rollout`, it gets its `Rollout`.
        train: tasks; any objects, also without end. One's id is its `task_id` or `id`, as an
            attribute or a key, else a hash of it: attempts of equal ids in one epoch are a group.
        val: held-out tasks: marked, never trained, never waiting for the trainer.
        reward: of the task and of what the agent returned, sync or async; None: a number that it
            returns, or what it gives by `tracegrad.reward`.
        attempts: of a group; None: as many as the trainer asks for, 1 without one.
        over_sample: attempts beyond them; those that run when a group is filled are cut.
        epochs: how often `train` goes by.
        steps: ends when the served version has risen by so many.
        eval_every: versions between two evaluations, which run beside the training. Without it
            there is one before and one after.
        eval_attempts: at each held-out task; the k of pass@k.
        stop_at: ends when held-out pass@1 is as high.
        patience: ends after so many evaluations without a higher pass@1.
        concurrency: agents at once, of training and evaluation together.
        retries: replacements for each attempt that failed by no doing of the agent.
        timeout_s: of each attempt. error_reward: of an agent that raises after an LLM call.
        infra_errors: exceptions that are not the agent's doing, beside those of clients whose
            server fails.
        tags: of training rollouts, by which the trainer may choose them (`data.tags`).
        name: the agent's; None: the function's.
        task_id: of a task; None: as said at `train`.
        folder: for the record and the picture; None: `.tracegrad/run/TIME`.
        resume: a folder of a run that was interrupted: what it has ended is not made again.
        ray: the address of a Ray cluster, of which this machine is a host: auto, or host:port. The
            agent is called on its hosts, in processes of their own, and `reward` here.
        ray_resources: of each call by Ray's names; None said: CPU 1.
        said: gets lines about the run's progress.

    Raises:
        ValueError: an argument is not what it must be; RecordError: `resume` is another run's.
        RuntimeError: an event loop runs here: `await tracegrad.run_async(...)`.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass  # what is raised below has nothing to do with this one
    else:
        raise RuntimeError("an event loop runs here: use `await tracegrad.run_async(...)`")
    return asyncio.run(run_async(agent, **options))


async def run_async(agent: Agent, **options: Unpack[RunOptions]) -> RunReport:
    """As `run`, where an event loop runs."""
    settings = TrainingSettings(**options)
    if not callable(agent):
        raise ValueError(f"agent: {agent!r:.60} is no function")
    function = FunctionCall(
        agent=agent, timeout_s=settings.timeout_s, infra_errors=settings.infra_errors
    )
    async with _caller(function, settings) as caller:
        return await _TrainingRun(_name(agent), caller, settings).run()


def _name(agent: Agent) -> str:
    return str(getattr(agent, "__name__", type(agent).__name__))


@asynccontextmanager
async def _caller(
    function: FunctionCall, settings: TrainingSettings
) -> AsyncIterator[FunctionCaller]:
    """Raises ValueError: as of `RayFunctions`."""
    if settings.ray is None:
        yield ThreadCaller(function)
        return
    hosts = RayFunctions(function, settings.ray, settings.ray_resources)
    try:
        room = hosts.connect(proxy_url())
        if room < settings.concurrency:
            settings.said(
                f"ray: the cluster has room for {room} of {settings.concurrency} agents"
                " (concurrency) at once; the others wait"
            )
        yield hosts
    finally:
        await asyncio.to_thread(hosts.close)


class _TrainingRun:
    """One call of `run`. All on one event loop."""

    def __init__(self, name: str, caller: FunctionCaller, settings: TrainingSettings) -> None:
        self._settings = settings
        self._began = time.monotonic()
        self._tasks: dict[GroupKey, Any] = {}  # of groups that are not over
        limits = StageLimits(settings.concurrency)
        self._training = FunctionSettings(
            caller=caller,
            name=settings.name or name,
            limits=limits,
            reward=settings.reward,
            error_reward=settings.error_reward,
            tags=settings.tags,
        )
        self._val = self._held_out_tasks()
        self._held_out = replace(self._training, held_out=True, tags={"split": "held_out"})
        self._pace = TrainerPace(said=settings.said)
        self._quarantine = QuarantineWatch(settings.said)
        self._failures = FirstFailures(settings.said)
        self._view: IntakeView | None = None
        self._evaluations: list[Evaluation] = []
        self._evaluated_at: int | None = None  # the version of the latest evaluation
        self._ended_by = "tasks"

    async def run(self) -> RunReport:
        settings = self._settings
        view = await self._look()
        attempts = settings.attempts or view.attempts or 1
        record = self._open_record(attempts)
        settle_lost(record.lost)
        self._evaluations = [Evaluation(**made) for made in record.evaluations]
        curve = TrainingRewards(record, lambda: self._version)
        scheduler = Scheduler(
            self._plans(record),
            SchedulerSettings(
                attempts=attempts,
                over_sample=settings.over_sample,
                agents=settings.concurrency,
                ahead=0,
                retries=settings.retries,
            ),
        )
        driver = Driver(
            scheduler,
            self._train_one,
            pace=self._pace,
            # The curve before the record: a line with the version goes before what begins with it.
            observer=Observers(
                [
                    curve,
                    record,
                    self._failures,
                    self._quarantine,
                    _Forgotten(self._tasks, scheduler),
                ]
            ),
        )
        try:
            await self._leave_out()
            if not self._is_evaluated():
                await self._evaluate(record)
            if (why := self._enough()) is not None:
                self._end(driver, why)
            async with asyncio.TaskGroup() as group:
                watching = [
                    group.create_task(self._watch(driver, curve, record)),
                    group.create_task(self._quarantine.watch()),
                ]
                await driver.run()
                for each in watching:
                    each.cancel()
            settings.said(curve.line(self._version))
            if self._evaluated_at is None or self._evaluated_at != (await self._look()).version:
                await self._evaluate(record)
        except asyncio.CancelledError:
            settings.said(f"interrupted; go on with resume={str(record.folder)!r}")
            raise
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            record.close()
            await asyncio.to_thread(exporter.flush)
        return self._report(scheduler, curve, record)

    async def _train_one(self, ticket: Ticket, observer: AttemptObserver) -> Attempt:
        task = self._tasks[ticket.group]
        return await run_function(task, ticket.group.task_id, self._training, observer)

    def _open_record(self, attempts: int) -> RunRecord:
        settings = self._settings
        folder = Path(settings.resume or settings.folder or new_run_folder(Path(".tracegrad/run")))
        header = RunHeader(
            tasks=self._training.name,
            attempts=attempts,
            over_sample=settings.over_sample,
            epochs=settings.epochs,
            held_out=False,
        )
        return RunRecord.open(folder, header, resume=settings.resume is not None)

    async def _leave_out(self) -> None:
        """What is quarantined already. Of a stream that is known when its tasks come again."""
        if isinstance(self._settings.train, Sized) and len(self._settings.train):
            known = dict.fromkeys(map(self._task_id, self._settings.train))
            await asyncio.to_thread(self._quarantine.look, known)

    def _plans(self, record: RunRecord) -> Iterator[GroupPlan]:
        seen: Counter[str] = Counter()
        left_out = 0  # in a row
        for _ in range(self._settings.epochs):
            for task in self._settings.train:
                task_id = self._task_id(task)
                # An endless stream asks the same again: that is another group, as in an epoch.
                key = GroupKey(seen[task_id], task_id)
                seen[task_id] += 1
                if self._quarantine.why(task_id) is not None:
                    if (left_out := left_out + 1) > _MOST_LEFT_OUT:
                        return
                    continue
                left_out = 0
                self._tasks[key] = task
                yield GroupPlan(key, record.ended_of(key))

    def _held_out_tasks(self) -> dict[GroupKey, Any]:
        """Raises ValueError."""
        found: dict[GroupKey, Any] = {}
        for task in self._settings.val:
            key = GroupKey(0, self._task_id(task))
            if key in found:
                raise ValueError(f"val: two tasks have the id {key.task_id!r:.60}")
            found[key] = task
        return found

    def _task_id(self, task: Any) -> str:
        named = self._settings.task_id
        return task_id_of(task) if named is None else named(task)

    async def _watch(self, driver: Driver, curve: TrainingRewards, record: RunRecord) -> None:
        """Evaluates when it is due, and ends the run when it is enough."""
        settings, first = self._settings, self._version
        said_at = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            version = (await self._look()).version
            if time.monotonic() - said_at >= _SAY_S:
                said_at = time.monotonic()
                settings.said(curve.line(version))
            if version is None:
                continue
            first = version if first is None else first
            if settings.steps is not None and version - first >= settings.steps:
                self._end(driver, "steps")
                return
            last = self._evaluated_at
            due = settings.eval_every is not None and (
                last is None or version - last >= settings.eval_every
            )
            if due:
                await self._evaluate(record)
                if (why := self._enough()) is not None:
                    self._end(driver, why)
                    return

    def _end(self, driver: Driver, why: str) -> None:
        self._ended_by = why
        driver.stop(f"the run has ended: {why}")

    def _enough(self) -> str | None:
        settings, made = self._settings, self._evaluations
        if not made:
            return None
        if settings.stop_at is not None and made[-1].pass_at_1 >= settings.stop_at:
            return "stop_at"
        if settings.patience is not None and len(made) > settings.patience:
            best = max(made, key=lambda one: one.pass_at_1)  # the first of equals
            if len(made) - 1 - made.index(best) >= settings.patience:
                return "patience"
        return None

    def _is_evaluated(self) -> bool:
        """By the part before the interruption, at the version that is served now: once more would
        be another one without a rise, for `patience`."""
        made, version = self._evaluations, self._version
        if not made or version is None or made[-1].version != version:
            return False
        self._evaluated_at = version
        return made[-1].asked == self._settings.eval_attempts * len(self._val)

    async def _look(self) -> IntakeView:
        """What was known before, where the proxy does not answer now."""
        try:
            self._view = await asyncio.to_thread(read_intake)
        except ProxyUnreachable as error:
            if self._view is None:
                raise ProxyUnreachable(
                    f"no proxy at {proxy_url()}: {error}; start `trainer serve` or `tracegrad"
                    " proxy`, or set TRACEGRAD_URL"
                ) from None
            log.warning("the policy version is not known: %s", error)
        return self._view

    @property
    def _version(self) -> int | None:
        return None if self._view is None else self._view.version

    async def _evaluate(self, record: RunRecord) -> None:
        settings = self._settings
        if not self._val:
            return
        began = time.monotonic() - self._began
        version = self._evaluated_at = (await self._look()).version
        rewards = EvaluationRewards()

        async def execute(ticket: Ticket, observer: AttemptObserver) -> Attempt:
            task = self._val[ticket.group]
            return await run_function(task, ticket.group.task_id, self._held_out, observer)

        scheduler = Scheduler(
            [GroupPlan(key) for key in self._val],
            SchedulerSettings(
                attempts=settings.eval_attempts,
                agents=settings.concurrency,
                ahead=0,
                retries=settings.retries,
            ),
        )
        observer = Observers([rewards, self._failures])
        await Driver(scheduler, execute, pace=unpaced, observer=observer).run()
        found = rewards.evaluation(version, began, settings.eval_attempts, len(self._val))
        if found is None:
            settings.said("held-out: no attempt has a reward")
            return
        self._evaluations.append(found)
        record.evaluated(asdict(found))
        settings.said(evaluation_line(found))

    def _report(self, scheduler: Scheduler, curve: TrainingRewards, record: RunRecord) -> RunReport:
        held_out = [
            CurvePoint(one.version, one.reward, one.rollouts)
            for one in self._evaluations
            if one.version is not None
        ]
        training = curve.points()
        picture = None
        if training or held_out:
            picture = draw_learning_curve(record.folder / PICTURE, training, held_out)
        return RunReport(
            evaluations=self._evaluations,
            training=training,
            outcomes=scheduler.counts.ended,
            replaced=scheduler.counts.replaced,
            cut=scheduler.counts.cut,
            groups=scheduler.counts.filled,
            left_out=self._quarantine.left_out(),
            ended_by=self._ended_by,
            seconds=time.monotonic() - self._began,
            folder=record.folder,
            picture=picture,
        )


class _Forgotten(RunObserver):
    """Tasks of groups that are over: a stream of them has no end."""

    def __init__(self, tasks: dict[GroupKey, Any], scheduler: Scheduler) -> None:
        self._tasks, self._scheduler = tasks, scheduler

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        for key in [key for key in self._tasks if self._scheduler.is_over(key)]:
            del self._tasks[key]


def task_id_of(task: Any) -> str:
    """Its `task_id` or `id`, as an attribute or a key, else a hash of it."""
    for name in ("task_id", "id"):
        found = task.get(name) if isinstance(task, Mapping) else getattr(task, name, None)
        if isinstance(found, str | int) and not isinstance(found, bool) and found != "":
            return str(found)
    try:
        text = json.dumps(task, sort_keys=True)
    except (TypeError, ValueError):
        raise ValueError(
            f"train: {task!r:.60} has no task_id or id, and is no JSON; give task_id=, a function"
        ) from None
    return hashlib.sha256(text.encode()).hexdigest()[:16]
