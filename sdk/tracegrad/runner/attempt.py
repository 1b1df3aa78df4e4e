"""One attempt of an agent that is a command: a rollout around it, its outcome, its reward."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tracegrad.call_check import question
from tracegrad.context import Rollout
from tracegrad.decorators import rollout
from tracegrad.events import Outcome, is_reward
from tracegrad.private_files import private_folder
from tracegrad.protocol import EVENTS_PATH
from tracegrad.runner.local_process import run_process
from tracegrad.runner.outcomes import ProcessEnd, classify
from tracegrad.transport import ProxyRefused, ProxyUnreachable, post_json

RewardSource = Literal["exit_code", "last_line"]
AGENT_LOG, REWARD_LOG = "agent.log", "reward.log"


class RewardFailed(Exception):
    """What scores the attempt did not say a number; the message is why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What is attempted, and how it is scored.

    Attributes:
        command: words; nothing is expanded.
        task_id: the group of its attempts.
        timeout_s: seconds of the command; None: no bound.
        reward: a line for the shell that runs after it in the same folder; None: nobody scores it
            here.
        reward_source: `exit_code`: 1 for 0, and 0 for 1; `last_line`: the number that it prints
            last.
        workspace: a folder of which each attempt gets a copy to run in; None: all run in the
            current one.
        logs: gets a folder for each attempt's output.
    """

    command: tuple[str, ...]
    task_id: str
    logs: Path
    agent: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    reward: str | None = None
    reward_source: RewardSource = "exit_code"
    reward_timeout_s: float = 300.0
    workspace: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """How it went. `reward` None: unknown. `calls` None: the proxy did not say."""

    rollout_id: str
    outcome: Outcome
    reason: str | None
    reward: float | None
    calls: int | None
    exit_code: int | None
    seconds: float
    logs: Path


async def run_attempt(spec: RunSpec, *, echo: Callable[[bytes], object] | None = None) -> Attempt:
    """A rollout of its own; takes a place that was asked for (`tracegrad.intake`).

    A cancellation ends the command, and the rollout as aborted.
    """
    with rollout(
        spec.task_id, tags=spec.tags, agent=spec.agent, input=list(spec.command)
    ) as opened:
        logs = private_folder(spec.logs / opened.id)
        with _folder(spec.workspace) as folder:
            end = await run_process(
                spec.command,
                folder=folder,
                environ=opened.environ,
                timeout_s=spec.timeout_s,
                output=logs / AGENT_LOG,
                marker=f"/rollouts/{opened.id}/",
                echo=echo,
            )
            calls = await asyncio.to_thread(calls_of, opened)
            found = classify(end, calls)
            outcome, reason, reward = found.outcome, found.reason, None
            if spec.reward is not None and outcome.scored:
                try:
                    reward = await _score(spec, opened, end, folder, logs)
                except RewardFailed as error:
                    outcome, reason = Outcome.ENV_ERROR, f"reward: {error}"
        if reward is not None:
            opened.reward(reward)
        opened.finish(outcome, reason)
    return Attempt(
        rollout_id=opened.id,
        outcome=outcome,
        reason=reason,
        reward=reward,
        calls=calls,
        exit_code=end.exit_code,
        seconds=end.seconds,
        logs=logs,
    )


def calls_of(opened: Rollout) -> int | None:
    """LLM calls that the proxy has of it; None: it does not answer."""
    try:
        answer = post_json(opened.url, EVENTS_PATH, question([opened.id]), {})
        counted = json.loads(answer)["calls"]
    except (ProxyUnreachable, ProxyRefused, ValueError, LookupError):
        return None
    return next((int(one["calls"]) for one in counted if one["rollout_id"] == opened.id), None)


@contextmanager
def _folder(workspace: Path | None) -> Iterator[Path]:
    if workspace is None:
        yield Path.cwd()
        return
    with tempfile.TemporaryDirectory(prefix="tracegrad-run-", ignore_cleanup_errors=True) as made:
        copy = Path(made) / workspace.resolve().name
        shutil.copytree(workspace, copy, symlinks=True)
        yield copy


async def _score(
    spec: RunSpec, opened: Rollout, end: ProcessEnd, folder: Path, logs: Path
) -> float:
    """Raises RewardFailed."""
    assert spec.reward is not None
    environ = {
        **os.environ,
        "TRACEGRAD_ROLLOUT_ID": opened.id,
        "TRACEGRAD_TASK_ID": spec.task_id,
        "TRACEGRAD_EXIT_CODE": "" if end.exit_code is None else str(end.exit_code),
        "TRACEGRAD_OUTPUT": str((logs / AGENT_LOG).resolve()),
        "TRACEGRAD_REWARD_OF": opened.id,
    }
    environ.pop("TRACEGRAD_API_KEY", None)  # it opens every rollout
    said = await run_process(
        spec.reward,
        folder=folder,
        environ=environ,
        timeout_s=spec.reward_timeout_s,
        output=logs / REWARD_LOG,
        marker=f"TRACEGRAD_REWARD_OF={opened.id}",
    )
    return read_reward(said, spec.reward_source)


def read_reward(said: ProcessEnd, source: RewardSource) -> float:
    """Raises RewardFailed."""
    if source == "exit_code" and said.exit_code in (0, 1):
        return 1.0 - said.exit_code
    if source == "exit_code" or said.exit_code != 0:
        raise RewardFailed(f"the command {said.describe()}")
    try:
        value = float(said.last_line)
    except ValueError:
        raise RewardFailed(f"its last line is {said.last_line!r:.60}, which is no number") from None
    if not (math.isfinite(value) and is_reward(value)):
        raise RewardFailed(f"its last line is {value:g}, which is no reward")
    return value


async def run_group(
    spec: RunSpec,
    attempts: int,
    *,
    concurrency: int,
    finished: Callable[[Attempt], object],
    echo: Callable[[bytes], object] | None = None,
) -> Sequence[Attempt]:
    """`attempts` at the task, at most `concurrency` side by side, in the order of their start.
    `finished` gets each when it is done."""
    free = asyncio.Semaphore(concurrency)

    async def one() -> Attempt:
        async with free:
            attempt = await run_attempt(spec, echo=echo)
        finished(attempt)
        return attempt

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one()) for _ in range(attempts)]
    return [task.result() for task in tasks]
