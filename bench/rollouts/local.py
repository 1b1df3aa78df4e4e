"""Rollouts that are processes of this machine, by the runner as `tracegrad run` uses it, with a
real proxy: what each takes beside its agent, and many of them at once."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    began: dict[str, float] = field(default_factory=dict)
    ended_: list[Ended] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)  # of this process, after each
    at_once: int = 0
    most_at_once: int = 0
    seconds: float = 0.0

    def begun(self, ticket: Ticket, rollout_id: str) -> None:
        self.began[rollout_id] = time.monotonic()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)

    def ended(self, ticket: Ticket, attempt: Attempt) -> None:
        self.at_once -= 1
        whole_s = time.monotonic() - self.began.pop(attempt.rollout_id)
        waited_s = attempt.seconds.get("queue", 0.0)
        sleep_s = self.sleeps[attempt.task_id]
        overhead_s = whole_s - waited_s - sleep_s
        stages = {
            "folder": attempt.seconds.get("sandbox", 0.0),
            "process": attempt.seconds.get("agent", sleep_s) - sleep_s,
        }
        stages["other"] = overhead_s - sum(stages.values())
        self.ended_.append(Ended(attempt.outcome, overhead_s, stages))
        self.rss_mib.append(psutil.Process().memory_info().rss / 2**20)

    @property
    def outcomes(self) -> Counter[Outcome]:
        return Counter(each.outcome for each in self.ended_)


def sleepers(rollouts: Sequence[Rollout], scale: float) -> list[tuple[Task, float]]:
    """Agents that do nothing but take the time of the rollout's environment, and that time."""
    found = []
    for number, rollout in enumerate(rollouts):
        sleep_s = round(max(FASTEST_S, sum(rollout.steps)) * scale, 3)
        task = Task(id=f"sleep {number}", command=("sleep", f"{sleep_s}"), reward=None)
        found.append((task, sleep_s))
    return found


async def many(tasks: Sequence[tuple[Task, float]], concurrency: int, logs: Path) -> Many:
    """All of them, at most `concurrency` at once, the others queued."""
    observer = Many({task.id: sleep_s for task, sleep_s in tasks})
    run = TaskRun(
        [task for task, _ in tasks],
        RunSettings(concurrency=concurrency),
        LocalSandboxes(),
        logs=logs,
        observer=observer,
    )
    began = time.monotonic()
    await run.run()
    observer.seconds = time.monotonic() - began
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
