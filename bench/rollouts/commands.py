"""Rollouts that are commands, by the runner as `tracegrad run` uses it, with a real proxy: what
each takes beside its agent, and many of them at once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.rollouts.workload import FASTEST_S, Rollout
from tracegrad import flush
from tracegrad.events import Outcome
from tracegrad.runner.attempt import Attempt
from tracegrad.runner.driver import RunObserver
from tracegrad.runner.local_sandbox import LocalSandboxes
from tracegrad.runner.sandbox import SandboxBackend, SandboxSpec
from tracegrad.runner.scheduler import Ticket
from tracegrad.runner.task import Task
from tracegrad.runner.task_run import RunSettings, TaskRun
from tracegrad_trainer.utils.network import find_free_port
from tracegrad_trainer.utils.subprocesses import ChildProcess, is_responding


@dataclass(frozen=True, slots=True)
class Ended:
    """`overhead_s`: of it all, but for its own sleep and for waiting for a free place; `stages`:
    the same by stage, `other` for what is none."""

    outcome: Outcome
    overhead_s: float
    stages: Mapping[str, float]


@dataclass(slots=True)
class Many(RunObserver):
    """What became of a run's attempts."""

    sleeps: dict[str, float]
    ended_: list[Ended] = field(default_factory=list)  # in the order of their beginnings
    rss_mib: list[float] = field(default_factory=list)  # of this process, after each
    most_at_once: int = 0  # agents
    seconds: float = 0.0
    agents: Callable[[], int] = lambda: 0
    _began: dict[str, float] = field(default_factory=dict)
    _found: list[tuple[float, Attempt, float]] = field(default_factory=list)

    def begun(self, ticket: Ticket, rollout_id: str) -> None:
        self._began[rollout_id] = time.monotonic()
        self.most_at_once = max(self.most_at_once, self.agents())

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        self.most_at_once = max(self.most_at_once, self.agents())
        began = self._began.pop(attempt.rollout_id)
        self._found.append((began, attempt, time.monotonic() - began))
        self.rss_mib.append(psutil.Process().memory_info().rss / 2**20)

    def stopped(self) -> None:
        """All of them: an attempt has its outcome before its sandbox stops."""
        in_order = sorted(self._found, key=lambda each: each[0])
        self.ended_ = [self._of(attempt, whole_s) for _, attempt, whole_s in in_order]

    def _of(self, attempt: Attempt, whole_s: float) -> Ended:
        seconds, sleep_s = attempt.seconds, self.sleeps[attempt.task_id]
        stop_s = seconds.get("stop", 0.0)
        overhead_s = whole_s + stop_s - seconds.get("queue", 0.0) - sleep_s
        stages = {
            "sandbox": seconds.get("sandbox", 0.0),
            "agent": seconds.get("agent", sleep_s) - sleep_s,
            "reward": seconds.get("reward", 0.0),
            "stop": stop_s,
        }
        stages["other"] = overhead_s - sum(stages.values())
        return Ended(attempt.outcome, overhead_s, stages)

    @property
    def errors(self) -> int:
        return sum(each.outcome is not Outcome.COMPLETED for each in self.ended_)


def sleepers(
    rollouts: Sequence[Rollout], scale: float, spec: SandboxSpec | None = None
) -> list[tuple[Task, float]]:
    """Agents that do nothing but take the time of the rollout's environment, and that time. Their
    reward is the least command that there is."""
    found = []
    for number, rollout in enumerate(rollouts):
        sleep_s = round(max(FASTEST_S, sum(rollout.steps)) * scale, 3)
        task = Task(
            id=f"sleep {number}",
            command=("sleep", f"{sleep_s}"),
            reward="true",
            sandbox=spec or SandboxSpec(),
        )
        found.append((task, sleep_s))
    return found


async def many(
    tasks: Sequence[tuple[Task, float]],
    concurrency: int,
    logs: Path,
    backend: SandboxBackend | None = None,
) -> Many:
    """All of them, at most `concurrency` at once, the others queued."""
    observer = Many({task.id: sleep_s for task, sleep_s in tasks})
    run = TaskRun(
        [task for task, _ in tasks],
        RunSettings(concurrency=concurrency),
        backend or LocalSandboxes(),
        logs=logs,
        observer=observer,
    )
    observer.agents = lambda: run.scheduler.with_agent
    began = time.monotonic()
    await run.run()
    observer.seconds = time.monotonic() - began
    observer.stopped()
    flush()
    return observer


@contextmanager
def proxy(folder: Path) -> Iterator[None]:
    """`tracegrad proxy` for this process's rollouts; its engine is never asked."""
    port = find_free_port()
    command = [sys.executable, "-m", "tracegrad.cli", "proxy", f"--port={port}", "--model=policy"]
    command += ["--upstream=http://127.0.0.1:9", f"--store=sqlite:///{folder}/store.db"]
    child = ChildProcess("proxy", command, log=folder / "proxy.log")
    child.start()
    try:
        url = f"http://127.0.0.1:{port}"
        child.wait_until_ready(lambda: is_responding(f"{url}/healthz"), timeout_s=600)
        os.environ["TRACEGRAD_URL"] = url
        yield
    finally:
        child.stop()
