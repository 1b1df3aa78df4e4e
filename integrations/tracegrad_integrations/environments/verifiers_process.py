"""Environments of `verifiers` (0.4), in a process with a Python of their own: what that package
pins fits nobody else.

Its own harness is the agent, and calls the rollout's address; its rewards are the rollout's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from tracegrad.context import Rollout
from tracegrad.events import Outcome
from tracegrad.runner.sandbox import BrokenEnvironment, SandboxUnavailable
from tracegrad_integrations.environments import verifiers_worker

Json = dict[str, Any]
_GRACE_S = 10.0
_TAIL_BYTES = 2_000
# By the type of its error (`verifiers.v1.errors`); others are the agent's doing.
_ENVIRONMENT = {"TaskError", "ToolsetError", "EnvError"}
_INFRASTRUCTURE = {"ProviderError", "SandboxError", "InterceptionError", "TunnelError"}
# By what it stopped.
_BUDGET = {
    "max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "agent_timeout",
}  # fmt: skip


class HarnessFailed(Exception):
    """The agent that verifiers ran: its own doing."""


class VerifiersEnvironment:
    """`with VerifiersEnvironment(…) as environment:`; `play` is an agent for `tracegrad.run`.

        settings = {"taskset": {"id": "my-taskset"}, "agent": {"runtime": {"type": "subprocess"}}}
        with VerifiersEnvironment(settings, python="vf/bin/python") as environment:
            tracegrad.run(environment.play, train=environment.tasks, name="my-taskset")

    Attributes:
        tasks: `id`, `index` and `prompt` of each.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        python: Path | str,
        limit: int = 1_000,
        model: str = "policy",
        folder: Path | str | None = None,
    ) -> None:
        """
        Args:
            settings: of the environment, as the table `env` of verifiers' own configuration.
            python: the one that has verifiers, and uv beside it.
            limit: tasks at most.
            folder: where it runs, and finds packages; None: the current one.
        """
        self._first = {"environment": dict(settings), "limit": limit}
        self._command = [str(python), verifiers_worker.__file__]
        self._model, self._folder = model, folder
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Json]] = {}
        self._lock = threading.Lock()
        self.tasks: Sequence[Json] = ()

    def __enter__(self) -> Self:
        """Raises BrokenEnvironment: it did not start; says why."""
        self._errors = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=self._folder,
                text=True,
                start_new_session=True,  # Ctrl-C is ours
            )
            self._send(self._first)
            assert self._process.stdout is not None
            first = self._process.stdout.readline()
            if not first:
                raise BrokenEnvironment(self._end())
        except OSError as error:
            self.close()
            raise BrokenEnvironment(f"verifiers: {self._command[0]}: {error.strerror}") from None
        except SandboxUnavailable as error:
            self.close()
            raise BrokenEnvironment(str(error)) from None
        except BaseException:
            self.close()
            raise
        told = json.loads(first)["tasks"]
        self.tasks = [{**task, "index": index} for index, task in enumerate(told)]
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Its episodes end with it."""
        process, errors = self._process, self._errors
        self._process = self._errors = None
        if process is not None:
            with suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if errors is not None:
            errors.close()

    async def play(self, task: Mapping[str, Any], rollout: Rollout) -> float | None:
        """An episode of one of `tasks`: the sum of its weighted rewards; None: it has none.

        Raises BrokenEnvironment, SandboxUnavailable, HarnessFailed.
        """
        number, answer = next(self._numbers), Future[Json]()
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                raise SandboxUnavailable(self._end())
            self._asked[number] = answer
        asked = {"task": task["index"], "base_url": rollout.base_url, "api_key": rollout.api_key}
        try:
            self._send({"number": number, "model": self._model, **asked})
            ended = await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            with suppress(SandboxUnavailable):
                self._send({"number": number, "cancel": True})
            raise
        finally:
            self._asked.pop(number, None)
        return _reward(ended, rollout)

    def _send(self, what: Json) -> None:
        """Raises SandboxUnavailable."""
        process = self._process
        if process is None or process.stdin is None:
            raise SandboxUnavailable(self._end())
        with self._lock:
            try:
                process.stdin.write(json.dumps(what) + "\n")
                process.stdin.flush()
            except (OSError, ValueError):  # it has ended, or it was closed meanwhile
                raise SandboxUnavailable(self._end()) from None

    def _read(self) -> None:
        """In a thread, to the end of the process."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            waiting = self._asked.get(answer["number"])
            if waiting is not None and waiting.set_running_or_notify_cancel():
                waiting.set_result(answer)
        process.wait()
        with self._lock:
            left = [*self._asked.values()]
        for waiting in left:
            if waiting.set_running_or_notify_cancel():
                waiting.set_exception(SandboxUnavailable(self._end()))

    def _end(self) -> str:
        """What its process said last."""
        process, errors = self._process, self._errors
        if process is None or errors is None:
            return "verifiers: its process was closed"
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        size = os.fstat(errors.fileno()).st_size
        said = os.pread(errors.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        lines = [line.strip() for line in said.decode(errors="replace").split("\n")]
        last = next((line for line in reversed(lines) if line), "")
        return f"verifiers: its process ended with exit code {process.returncode}: {last}"


def _reward(ended: Json, rollout: Rollout) -> float | None:
    """Says the parts, too, where there are several. Raises as `play`."""
    if (error := ended.get("error")) is not None:
        said = f"verifiers: {error['type']}: {error['message']}"
        if error["type"] in _INFRASTRUCTURE:
            raise SandboxUnavailable(said)
        if error["type"] in _ENVIRONMENT:
            raise BrokenEnvironment(said)
        raise HarnessFailed(said)
    stop, rewards = ended["stop"] or "", ended["rewards"]
    if stop in _BUDGET:
        rollout.finish(Outcome.BUDGET, f"verifiers: {stop}")
    elif stop.endswith("_timeout"):
        raise BrokenEnvironment(f"verifiers: {stop}")
    known = {name: one for name, one in rewards.items() if one is not None}
    if len(known) > 1:
        for name, one in known.items():
            if name != "reward":
                rollout.reward(one["score"], name=name)
    if len(known) < len(rewards) or not known:
        return 0.0 if stop in _BUDGET else None
    return float(sum(one["value"] for one in known.values()))
