"""`tracegrad.run`: training tasks go to an agent that is a function, beside a trainer that serves;
held-out ones say what it was worth."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import operator
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from tracegrad import exporter
from tracegrad.context import proxy_url
from tracegrad.events import Outcome
from tracegrad.intake_client import IntakeView, read_intake
from tracegrad.pass_at_k import mean_pass_at_k
from tracegrad.runner.attempt import Attempt, AttemptObserver
from tracegrad.runner.driver import Driver, RunObserver, TrainerPace, unpaced
from tracegrad.runner.function_attempt import FunctionSettings, Reward, run_function
from tracegrad.runner.function_call import Agent, FunctionCall, FunctionCaller, ThreadCaller
from tracegrad.runner.learning_curve import CurvePoint, draw_learning_curve
from tracegrad.runner.ray_functions import RayFunctions
from tracegrad.runner.run_record import RunHeader, RunRecord, new_run_folder
from tracegrad.runner.scheduler import GroupKey, GroupPlan, Scheduler, SchedulerSettings, Ticket
from tracegrad.runner.stage_limits import StageLimits
from tracegrad.runner.task_run import Observers, settle_lost
from tracegrad.transport import ProxyUnreachable

log = logging.getLogger("tracegrad.runner")

_LOOK_S = 1.0  # between two looks at the policy version
_SAY_S = 10.0
_RECENT = 256  # rollouts of the mean that is said
_MOST_FAILURES = 20  # kinds of them that are said
PICTURE = "learning_curve.png"
# Numbers by the least that they may be.
_COUNTS: Mapping[int, Sequence[str]] = {
    0: ("over_sample", "retries"),
    1: ("attempts", "epochs", "steps", "eval_every", "eval_attempts", "patience", "concurrency"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out attempts. `version`: the policy's that was served when it began; None: unknown.
    `pass_at_k`: with `k` attempts; None: no task has as many with a reward. `reward`: the mean.
    `rollouts`: that have one, of `asked`."""

    version: int | None
    at_s: float
    pass_at_1: float
    pass_at_k: float | None
    k: int
    reward: float
    rollouts: int
    asked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a run came to, with its part before an interruption but for `outcomes`, `replaced`,
    `cut` and `seconds`.

    Attributes:
        evaluations: in their order: before, every `eval_every` versions, after.
        training: mean rewards of training rollouts by the version that was served when they began.
        outcomes: of training rollouts.
        replaced, cut: attempts that were made again; that their group did not need.
        groups: that have all their attempts.
        ended_by: `tasks`, `steps`, `stop_at` or `patience`.
        folder: the run's; `run(..., resume=folder)` goes on with it.
        picture: the learning curve; None: matplotlib is not there, or no version is known.
    """

    evaluations: Sequence[Evaluation]
    training: Sequence[CurvePoint]
    outcomes: Mapping[Outcome, int]
    replaced: int
    cut: int
    groups: int
    ended_by: str
    seconds: float
    folder: Path
    picture: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """As of `run`."""

    train: Iterable[Any] = ()
    val: Sequence[Any] = ()
    reward: Reward | None = None
    attempts: int | None = None
    over_sample: int = 0
    epochs: int = 1
    steps: int | None = None
    eval_every: int | None = None
    eval_attempts: int = 1
    stop_at: float | None = None
    patience: int | None = None
    concurrency: int = 32
    retries: int = 2
    timeout_s: float | None = None
    error_reward: float | None = 0.0
    infra_errors: tuple[type[Exception], ...] = ()
    tags: Mapping[str, object] = field(default_factory=lambda: {"split": "train"})
    name: str | None = None
    task_id: Callable[[Any], str] | None = None
    folder: Path | str | None = None
    resume: Path | str | None = None
    ray: str | None = None
    ray_resources: Mapping[str, float] = field(default_factory=dict)
    said: Callable[[str], object] = print

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for least, names in _COUNTS.items():
            for name in names:
                value = getattr(self, name)
                if value is not None and not _is_count(value, least):
                    raise ValueError(f"{name}: {value!r:.60} is not {least} or more")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s: {self.timeout_s} is not more than 0")
        if _goes_by_once("val", self.val):
            raise ValueError("val: an iterator goes by once, and is asked again; give a list")
        if _goes_by_once("train", self.train) and self.epochs > 1:
            raise ValueError("epochs: train is an iterator, which goes by once; give a list")
        for name in ("eval_every", "stop_at", "patience"):
            if getattr(self, name) is None:
                continue
            if not self.val:
                raise ValueError(f"{name}: needs held-out tasks; give val=")
            if self.eval_every is None:
                raise ValueError(f"{name}: needs evaluations meanwhile; give eval_every=")
        if self.resume is not None and self.folder is not None:
            raise ValueError("folder: resume names it already")
        if self.ray_resources and self.ray is None:
            raise ValueError("ray_resources: there is no ray; give the cluster's address")
        for name, amount in self.ray_resources.items():
            if not 0 <= amount < math.inf:
                raise ValueError(f"ray_resources: {name} = {amount} is not an amount")


def _is_count(value: Any, least: int) -> bool:
    try:
        return operator.index(value) >= least
    except TypeError:
        return False


def _goes_by_once(name: str, tasks: Any) -> bool:
    """Raises ValueError: these are no tasks. A text is one letter after another."""
    try:
        found = iter(tasks)
    except TypeError:
        found = None
    if found is None or isinstance(tasks, str | bytes):
        raise ValueError(f"{name}: {tasks!r:.60} is no list of tasks")
    return found is tasks


class RunOptions(TypedDict, total=False):
    """As of `run`."""

    train: Iterable[Any]
    val: Sequence[Any]
    reward: Reward | None
    attempts: int | None
    over_sample: int
    epochs: int
    steps: int | None
    eval_every: int | None
    eval_attempts: int
    stop_at: float | None
    patience: int | None
    concurrency: int
    retries: int
    timeout_s: float | None
    error_reward: float | None
    infra_errors: tuple[type[Exception], ...]
    tags: Mapping[str, object]
    name: str | None
    task_id: Callable[[Any], str] | None
    folder: Path | str | None
    resume: Path | str | None
    ray: str | None
    ray_resources: Mapping[str, float]
    said: Callable[[str], object]


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
        self._failures = _Failures(settings.said)
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
        curve = _Curve(record, lambda: self._version)
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
            observer=Observers([curve, record, self._failures, _Forgotten(self._tasks, scheduler)]),
        )
        try:
            await self._evaluate(record)
            if (why := self._enough()) is not None:
                self._end(driver, why)
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch(driver, curve, record))
                await driver.run()
                watching.cancel()
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

    def _plans(self, record: RunRecord) -> Iterator[GroupPlan]:
        seen: Counter[str] = Counter()
        for _ in range(self._settings.epochs):
            for task in self._settings.train:
                task_id = self._task_id(task)
                # An endless stream asks the same again: that is another group, as in an epoch.
                key = GroupKey(seen[task_id], task_id)
                seen[task_id] += 1
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

    async def _watch(self, driver: Driver, curve: _Curve, record: RunRecord) -> None:
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
        rewards = _Rewards()

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
        settings.said(_evaluation_line(found))

    def _report(self, scheduler: Scheduler, curve: _Curve, record: RunRecord) -> RunReport:
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
            ended_by=self._ended_by,
            seconds=time.monotonic() - self._began,
            folder=record.folder,
            picture=picture,
        )


class _Curve(RunObserver):
    """Training rewards by the version that was served when their attempts began."""

    def __init__(self, record: RunRecord, version: Callable[[], int | None]) -> None:
        self._record, self._version = record, version
        self._served: int | None = None  # as the record says
        self._began: dict[Ticket, int | None] = {}
        self._rewards: defaultdict[int, list[float]] = defaultdict(list)
        self._known: list[float] = []
        for one in record.past:
            self._add(one.version, one.reward)
        self._before, self._since = len(self._known), time.monotonic()

    def begun(self, ticket: Ticket, rollout_id: str) -> None:
        version = self._began[ticket] = self._version()
        if version is not None and version != self._served:
            self._served = version
            self._record.served(version)

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        self._add(self._began.pop(ticket, None), attempt.reward)

    def _add(self, version: int | None, reward: float | None) -> None:
        if reward is None:
            return
        self._known.append(reward)
        if version is not None:
            self._rewards[version].append(reward)

    def points(self) -> list[CurvePoint]:
        return [
            CurvePoint(version, sum(rewards) / len(rewards), len(rewards))
            for version, rewards in sorted(self._rewards.items())
        ]

    def line(self, version: int | None) -> str:
        served = "" if version is None else f"version {version}: "
        recent = self._known[-_RECENT:]
        if not recent:
            return f"{served}no training rollout has a reward"
        passed_s = max(1e-3, time.monotonic() - self._since)
        per_minute = 60 * (len(self._known) - self._before) / passed_s
        return (
            f"{served}{len(self._known)} training rollouts, {per_minute:.0f}/min, "
            f"mean reward of the last {len(recent)}: {sum(recent) / len(recent):.2f}"
        )


class _Failures(RunObserver):
    """Says the first of each kind: nobody else does while a run goes on."""

    def __init__(self, said: Callable[[str], object]) -> None:
        self._said = said
        self._known: set[tuple[Outcome, str]] = set()

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        outcome, reason = attempt.outcome, attempt.reason or ""
        if outcome in (Outcome.COMPLETED, Outcome.BUDGET, Outcome.ABORTED):
            return
        kind = outcome, reason.partition(":")[0]
        if kind not in self._known and len(self._known) < _MOST_FAILURES:
            self._known.add(kind)
            self._said(f"{outcome} at {attempt.task_id:.60}, {attempt.rollout_id}: {reason:.300}")


class _Rewards(RunObserver):
    """Of an evaluation, by task."""

    def __init__(self) -> None:
        self._rewards: defaultdict[GroupKey, list[float]] = defaultdict(list)

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        if attempt.reward is not None:
            self._rewards[ticket.group].append(attempt.reward)

    def evaluation(self, version: int | None, at_s: float, k: int, tasks: int) -> Evaluation | None:
        """None: nothing has a reward."""
        known = [reward for rewards in self._rewards.values() for reward in rewards]
        if not known:
            return None
        return Evaluation(
            version=version,
            at_s=at_s,
            pass_at_1=mean_pass_at_k(self._rewards.values(), 1) or 0.0,
            pass_at_k=mean_pass_at_k(self._rewards.values(), k),
            k=k,
            reward=sum(known) / len(known),
            rollouts=len(known),
            asked=k * tasks,
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


def _evaluation_line(made: Evaluation) -> str:
    version = "" if made.version is None else f" at version {made.version}"
    more = ""
    if made.k > 1 and made.pass_at_k is not None:
        more = f", pass@{made.k} {made.pass_at_k:.3f}"
    missing = made.asked - made.rollouts
    unknown = f"; {missing} more have no reward" if missing else ""
    return (
        f"held-out{version}: pass@1 {made.pass_at_1:.3f}{more} of {made.rollouts} rollouts{unknown}"
    )
