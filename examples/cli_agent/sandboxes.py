"""Where mini-swe-agent works: a container for each attempt, or a folder of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from examples.shop.screen import Screen

from tracegrad import intake
from tracegrad.context import proxy_url
from tracegrad.runner.agent_install import InstallFailed, install_agent
from tracegrad.runner.agent_launcher import AgentLauncher
from tracegrad.runner.attempt import Attempt, AttemptObserver, AttemptSettings, run_attempt
from tracegrad.runner.driver import Driver, RunObserver, unpaced
from tracegrad.runner.recipe_files import find_recipe
from tracegrad.runner.sandbox import SandboxBackend, SandboxSpec, SandboxUnavailable
from tracegrad.runner.sandbox_backend import (
    ContainerOptions,
    check_docker,
    check_engine,
    sandbox_backend,
)
from tracegrad.runner.scheduler import GroupKey, GroupPlan, Scheduler, SchedulerSettings, Ticket
from tracegrad.runner.stage_limits import StageLimits
from tracegrad.runner.task import Task as RunnerTask

from .tasks import Split, Task, workspace

RECIPE = Path(__file__).with_name("mini.toml")
IMAGE = Path(__file__).with_name("image")  # its Dockerfile
AGENTS = 4  # at a time: most of an attempt is the start of a Python
TIMEOUT_S = 300.0
# A reward that says nothing: a coin's, which the rollout's own name decides. Python's doing, which
# is there because the agent runs on it: an image may lack `cksum`.
COIN = (
    'python3 -c "import os, zlib; '
    "raise SystemExit(zlib.crc32(os.environ['TRACEGRAD_ROLLOUT_ID'].encode()) % 2)\""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is attempted. `attempts` of each task; `coin`: rewards say nothing."""

    split: Split
    attempts: int
    coin: bool = False


class Sandboxes:
    """Attempts at tasks by mini-swe-agent, at most AGENTS side by side."""

    def __init__(self, backend: SandboxBackend, launcher: AgentLauncher, spec: SandboxSpec) -> None:
        self._backend, self._launcher, self._spec = backend, launcher, spec

    async def attempt(
        self,
        tasks: Iterable[Task],
        work: Work,
        *,
        logs: Path,
        observer: RunObserver,
        enough: Callable[[], bool] | None = None,
    ) -> None:
        """Each task once as a group of attempts, in order.

        `enough`: of what is trained on: `tasks` may be endless, the trainer says when attempts may
        begin, and nothing goes on once it is true. None: nobody trains on them.
        """
        known: dict[GroupKey, RunnerTask] = {}

        def plans() -> Iterable[GroupPlan]:
            for number, task in enumerate(tasks):
                key = GroupKey(number, task.task_id)
                known[key] = self._runner_task(task, work)
                yield GroupPlan(key)

        settings = AttemptSettings(
            backend=self._backend,
            logs=logs,
            limits=StageLimits(AGENTS, starts=2),
            prepare=self._launcher,
            held_out=work.split == "held_out",
        )

        async def execute(ticket: Ticket, observer: AttemptObserver) -> Attempt:
            return await run_attempt(known[ticket.group], settings, observer)

        scheduler = Scheduler(
            plans(), SchedulerSettings(attempts=work.attempts, agents=AGENTS, ahead=2)
        )
        driver = Driver(scheduler, execute, pace=unpaced, observer=observer)
        if enough is not None:
            driver = Driver(
                scheduler, execute, pace=lambda: _place(driver, enough), observer=observer
            )
        await driver.run()

    def _runner_task(self, task: Task, work: Work) -> RunnerTask:
        return self._launcher.add(
            RunnerTask(
                id=task.task_id,
                agent=str(RECIPE),
                prompt=task.prompt,
                sandbox=self._spec,
                timeout_s=TIMEOUT_S,
                reward=COIN if work.coin else task.reward,
                tags={"split": work.split},
            )
        )


async def _place(driver: Driver, enough: Callable[[], bool]) -> str | None:
    while not enough():
        with suppress(TimeoutError):
            return (await intake(1, timeout_s=1.0)).rollout_ids[0]
    driver.stop("the trainer has made its steps")
    return None


def spec_of(*, local: bool, image: str | None) -> SandboxSpec:
    """Processes of this machine; else a container of `image`, or of one that is built here."""
    if local:
        return SandboxSpec()
    return SandboxSpec(
        image=image,
        build=IMAGE if image is None else None,
        workdir="/workspace",
        memory_mb=1024,
        pids=64,
        user="1000:1000",
    )


@asynccontextmanager
async def opened(spec: SandboxSpec, root: Path) -> AsyncIterator[Sandboxes]:
    """Containers are ready before they are asked for, and reach the proxy alone."""
    spec = replace(spec, workspace=workspace(root / "files"))
    with AgentLauncher(model="policy") as launcher:
        options = ContainerOptions(warm=AGENTS, layer=launcher.layer)
        backend = sandbox_backend([spec], proxy=proxy_url(), options=options)
        try:
            yield Sandboxes(backend, launcher, spec)
        finally:
            await backend.close()


class Unusable(RuntimeError):
    """One line: what is missing, and the fix."""


def install(screen: Screen, spec: SandboxSpec) -> None:
    """mini-swe-agent, pinned by hash, into the cache of agents. Raises Unusable."""
    try:
        check_docker([spec])
        check_engine([spec])  # else a warm start would be over before somebody says it
        with screen.phase("install mini-swe-agent") as phase:
            phase.note = install_agent(find_recipe(str(RECIPE))).folder.name
    except (InstallFailed, SandboxUnavailable, ValueError) as error:
        raise Unusable(str(error)) from None
