"""One attempt at a task: a rollout around its stages, its outcome, its reward."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracegrad.call_check import question
from tracegrad.client_environ import HELD_OUT_VARIABLE, client_variables, direct_variables
from tracegrad.context import Rollout
from tracegrad.decorators import rollout
from tracegrad.events import Outcome
from tracegrad.private_files import private_folder
from tracegrad.protocol import EVENTS_PATH, IMAGE_TAG, REWARD_SPAN, SANDBOX_SPAN
from tracegrad.runner.cancellation import cancelled, to_its_end
from tracegrad.runner.outcomes import CallsMade, Classified, ProcessEnd, classify
from tracegrad.runner.reward import RewardFailed, read_reward, reward_line
from tracegrad.runner.sandbox import (
    BrokenEnvironment,
    Sandbox,
    SandboxBackend,
    SandboxUnavailable,
)
from tracegrad.runner.sandbox_backend import image_name
from tracegrad.runner.stage_limits import StageLimits, StageTimeouts
from tracegrad.runner.task import AgentCommand, Task
from tracegrad.telemetry import SpanScope
from tracegrad.transport import ProxyRefused, ProxyUnreachable, post_json

log = logging.getLogger("tracegrad.runner")

AGENT_LOG, REWARD_LOG, CLEAR_LOG = "agent.log", "reward.log", "clear.log"
# Where a scorer finds the agent's output, in a sandbox that has other files than this machine.
_OUTPUT_INSIDE = "tracegrad-agent.log"
# How a task and the place where it runs become what is run.
Prepare = Callable[[Task, Rollout, Sandbox], AgentCommand]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """How it went. `reward` None: unknown. `calls` None: the proxy did not say. `seconds`: by
    stage, of those that it came to: `queue` (for a free start, and for a free agent), `sandbox`
    (its start), `agent`, `reward`, `stop`."""

    rollout_id: str
    task_id: str
    outcome: Outcome
    reason: str | None
    reward: float | None = None
    calls: int | None = None
    exit_code: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    logs: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSettings:
    """What all attempts of a run share.

    Attributes:
        logs: gets a folder for each attempt's output.
        held_out: never trained, by mark.
        echo: gets what agents print, too.
    """

    backend: SandboxBackend
    logs: Path
    limits: StageLimits
    timeouts: StageTimeouts = field(default_factory=StageTimeouts)
    prepare: Prepare | None = None
    held_out: bool = False
    echo: Callable[[bytes], object] | None = None


class AttemptObserver:
    """What is told of an attempt while it is made, in this order; does nothing by itself."""

    def opened(self, rollout_id: str) -> None:
        """Before anything of it runs."""

    def sandbox_tried(self, came: bool) -> None:
        """`came` False: the machine's doing."""

    def agent_began(self) -> None: ...

    def agent_ended(self) -> None: ...

    def finished(self, attempt: Attempt) -> None:
        """Its outcome and reward are said; its sandbox has not stopped yet."""


async def run_attempt(task: Task, settings: AttemptSettings, observer: AttemptObserver) -> Attempt:
    """A rollout of its own; takes a place that was asked for (`tracegrad.intake`).

    Whatever the runner itself fails by is `infra_error`: it is never scored. A cancellation ends
    what runs, and the rollout as aborted with the cancellation's message.
    """
    # By which a broken image is found (`quarantine.py`).
    name = await asyncio.to_thread(image_name, task.sandbox)
    image = {} if name is None else {IMAGE_TAG: name}
    with rollout(
        task.id,
        tags={**task.tags, **image},
        agent=task.agent,
        input=task.prompt or task.command,
        held_out=settings.held_out,
    ) as own:
        observer.opened(own.id)
        attempt = _Attempt(task, own, settings, observer)
        try:
            return await attempt.run()
        except asyncio.CancelledError as error:
            own.finish(Outcome.ABORTED, str(error) or "interrupted")
            raise


class _Attempt:
    def __init__(
        self,
        task: Task,
        opened: Rollout,
        settings: AttemptSettings,
        observer: AttemptObserver,
    ) -> None:
        self._task, self._opened, self._settings = task, opened, settings
        self._observer, self._logs = observer, settings.logs / opened.id
        self._seconds: dict[str, float] = {}
        self._sandbox: Sandbox | None = None
        self._end: ProcessEnd | None = None
        self._calls: int | None = None
        self._reward: float | None = None
        self._marker = f"/rollouts/{opened.id}/"

    async def run(self) -> Attempt:
        try:
            found = await self._stages()
            if self._reward is not None:
                self._opened.reward(self._reward)
            self._opened.finish(found.outcome, found.reason)
            made = self._made(found)
            self._observer.finished(made)
        finally:
            if self._sandbox is not None:
                await to_its_end(self._stop(self._sandbox))
        return made

    async def _stages(self) -> Classified:
        try:
            private_folder(self._logs)
            self._sandbox = await self._start()
            return await self._run_and_score(self._sandbox)
        except SandboxUnavailable as error:
            return Classified(Outcome.INFRA_ERROR, f"sandbox: {error}")
        except BrokenEnvironment as error:
            return Classified(Outcome.ENV_ERROR, f"sandbox: {error}")
        except Exception as error:
            log.exception("an attempt of the task %s failed in the runner", self._task.id)
            return Classified(Outcome.INFRA_ERROR, f"runner: {type(error).__name__}: {error}")

    def _made(self, found: Classified) -> Attempt:
        return Attempt(
            rollout_id=self._opened.id,
            task_id=self._task.id,
            outcome=found.outcome,
            reason=found.reason,
            reward=self._reward,
            calls=self._calls,
            exit_code=None if self._end is None else self._end.exit_code,
            seconds=self._seconds,
            logs=self._logs,
        )

    async def _start(self) -> Sandbox:
        """Raises SandboxError."""
        timeout_s = self._settings.timeouts.start_s
        with SpanScope(SANDBOX_SPAN, self._opened.url):
            async with self._queued(self._settings.limits.start()):
                try:
                    with self._timed("sandbox"):
                        async with asyncio.timeout(timeout_s):
                            found = await self._settings.backend.start(self._task.sandbox)
                except BrokenEnvironment:
                    self._observer.sandbox_tried(True)  # the machine did its part
                    raise
                except TimeoutError:
                    self._observer.sandbox_tried(False)
                    raise SandboxUnavailable(f"did not start in {timeout_s:g} s") from None
                except Exception:  # a cancellation says nothing of the machine
                    self._observer.sandbox_tried(False)
                    raise
                self._observer.sandbox_tried(True)
                return found

    async def _run_and_score(self, sandbox: Sandbox) -> Classified:
        async with self._queued(self._settings.limits.agent()):
            self._observer.agent_began()
            try:
                with self._timed("agent"):
                    self._end = await self._run_agent(sandbox)
            finally:
                self._observer.agent_ended()
        calls = await asyncio.to_thread(calls_of, self._opened)
        self._calls = None if calls is None else calls.count
        found = classify(self._end, calls)
        if self._task.reward is None or not found.outcome.scored:
            return found
        try:
            self._reward = await self._score(sandbox, self._end)
            return found
        except SandboxUnavailable as error:
            return Classified(Outcome.INFRA_ERROR, _then(found, f"reward: {error}"))
        except (RewardFailed, BrokenEnvironment) as error:
            return Classified(Outcome.ENV_ERROR, _then(found, f"reward: {error}"))

    async def _run_agent(self, sandbox: Sandbox) -> ProcessEnd:
        task, silent_s = self._task, self._settings.timeouts.silent_s
        prepared = (self._settings.prepare or plain_command)(task, self._opened, sandbox)
        await _write_files(sandbox, prepared.files)
        base_url = sandbox.reachable(self._opened.base_url)
        addresses = client_variables(base_url, self._opened.api_key)
        # An agent may open rollouts itself (`@trace`), which would be trained.
        mark = {HELD_OUT_VARIABLE: "1"} if self._opened.held_out else {}
        environ = {**task.environ, **addresses, **prepared.environ, **mark}
        inherited = os.environ if sandbox.shares_files else {}
        environ |= direct_variables(base_url, {**inherited, **environ})
        life = _SignsOfLife(self._opened, self._settings.echo)
        running = asyncio.create_task(
            sandbox.run(
                prepared.command,
                environ=environ,
                timeout_s=task.timeout_s,
                output=self._logs / AGENT_LOG,
                marker=self._marker,
                echo=life.heard,
            )
        )
        try:
            if silent_s is None:
                return await running
            return await life.watch(running, silent_s)
        finally:
            await cancelled(running)

    async def _score(self, sandbox: Sandbox, end: ProcessEnd) -> float:
        """Raises RewardFailed, SandboxError."""
        task, output = self._task, self._logs / AGENT_LOG
        with SpanScope(REWARD_SPAN, self._opened.url):
            async with self._settings.limits.reward():
                with self._timed("reward"):
                    await self._upload_hidden(sandbox)
                    seen = str(output.resolve())
                    if not sandbox.shares_files:
                        await _upload(sandbox, output, seen := f"{sandbox.temp}/{_OUTPUT_INSIDE}")
                    said = await sandbox.run(
                        reward_line(task),
                        environ=self._reward_environ(end, seen),
                        timeout_s=task.reward_timeout_s,
                        output=self._logs / REWARD_LOG,
                        marker=f"TRACEGRAD_REWARD_OF={self._opened.id}",
                    )
                    return await read_reward(task, said, sandbox, self._logs)

    async def _upload_hidden(self, sandbox: Sandbox) -> None:
        """What the reward alone may see, in the place of what the agent may have left there."""
        uploads = self._task.reward_uploads
        if not uploads:
            return
        said = await sandbox.run(
            ["rm", "-rf", "--", *uploads.values()],
            environ={"TRACEGRAD_CLEARING": self._opened.id},
            timeout_s=self._task.reward_timeout_s,
            output=self._logs / CLEAR_LOG,
            marker=f"TRACEGRAD_CLEARING={self._opened.id}",
        )
        if said.exit_code != 0:
            raise RewardFailed(f"rm of {', '.join(uploads.values())} {said.describe()}")
        for source, target in uploads.items():
            await _upload(sandbox, Path(source), target)

    def _reward_environ(self, end: ProcessEnd, output: str) -> dict[str, str | None]:
        return {
            **self._task.environ,
            **self._task.reward_environ,
            "TRACEGRAD_ROLLOUT_ID": self._opened.id,
            "TRACEGRAD_TASK_ID": self._task.id,
            "TRACEGRAD_EXIT_CODE": "" if end.exit_code is None else str(end.exit_code),
            "TRACEGRAD_OUTPUT": output,
            "TRACEGRAD_REWARD_OF": self._opened.id,
        }

    async def _stop(self, sandbox: Sandbox) -> None:
        async with self._settings.limits.stop():
            with self._timed("stop"):
                try:
                    async with asyncio.timeout(self._settings.timeouts.stop_s):
                        await sandbox.close()
                except Exception as error:  # the rollout has ended; its backend closes once more
                    log.warning("a sandbox of %s did not stop: %r", self._opened.id, error)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.monotonic() - began

    @asynccontextmanager
    async def _queued(self, place: Any) -> AsyncIterator[None]:
        began = time.monotonic()
        async with place:
            waited = time.monotonic() - began
            self._seconds["queue"] = self._seconds.get("queue", 0.0) + waited
            yield


def plain_command(task: Task, opened: Rollout, sandbox: Sandbox) -> AgentCommand:
    """Of tasks that say it themselves."""
    assert task.command is not None, "a task without a command needs an agent's recipe"
    return AgentCommand(command=task.command)


def calls_of(opened: Rollout) -> CallsMade | None:
    """None: the proxy does not answer."""
    try:
        answer = post_json(opened.url, EVENTS_PATH, question([opened.id]), {})
        counted = json.loads(answer)["calls"]
    except (ProxyUnreachable, ProxyRefused, ValueError, LookupError):
        return None
    for one in counted:
        if one["rollout_id"] == opened.id:
            return CallsMade(int(one["calls"]), bool(one.get("last_failed")))
    return None


class _SignsOfLife:
    """What an agent prints, and the calls that it makes."""

    def __init__(self, opened: Rollout, echo: Callable[[bytes], object] | None) -> None:
        self._opened, self._echo = opened, echo
        self._last = self._began = time.monotonic()
        self._calls = 0

    def heard(self, some: bytes) -> None:
        self._last = time.monotonic()
        if self._echo is not None:
            self._echo(some)

    async def watch(self, running: asyncio.Task[ProcessEnd], silent_s: float) -> ProcessEnd:
        """Its end; of one that is silent for so long, an end without an exit code."""
        while True:
            quiet_s = time.monotonic() - self._last
            done, _ = await asyncio.wait({running}, timeout=max(0.0, silent_s - quiet_s))
            if done:
                return running.result()
            if time.monotonic() - self._last < silent_s:
                continue
            calls = await asyncio.to_thread(calls_of, self._opened)
            # A proxy that does not answer says nothing about the agent.
            if calls is None or calls.count > self._calls:
                self._calls = self._calls if calls is None else calls.count
                self._last = time.monotonic()
            elif not running.done():
                await cancelled(running)
                return ProcessEnd(None, time.monotonic() - self._began, silent_s=silent_s)


async def _upload(sandbox: Sandbox, source: Path, target: str) -> None:
    try:
        await sandbox.upload(source, target)
    except OSError as error:
        raise BrokenEnvironment(f"{source} cannot be copied to {target}: {error}") from None


async def _write_files(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    for target, text in files.items():
        with tempfile.NamedTemporaryFile("w", prefix="tracegrad-") as file:
            file.write(text)
            file.flush()
            await _upload(sandbox, Path(file.name), target)


def _then(first: Classified, then: str) -> str:
    """The first cause stays beside the one that decides."""
    return then if first.reason is None else f"{then}; before that, the agent {first.reason}"
