"""The process that runs a task file against what the gate looks at: `python -m ... SETTINGS.json`.

A part of `trainer serve`. The tasks are run by `tracegrad run --eval`, through the proxy as any
agent, again and again until the gate has what it wants of the version: a candidate's verdict, or a
promoted version's rollouts to compare the next one with. What comes of them are held-out rollouts
as others' are; the gate does not know who made them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracegrad.runner.task_files import TaskDefaults, load_tasks
from tracegrad.store import Store, StoreUnavailable
from tracegrad.store.read.held_out import VERSION_TAG
from tracegrad.urls import unmasked
from tracegrad_trainer.config.data import DataSettings
from tracegrad_trainer.config.promotion import PromotionSettings
from tracegrad_trainer.launch.run_state import RunState
from tracegrad_trainer.launch.workers import EVALUATOR
from tracegrad_trainer.promotion.gate import PromotionGate
from tracegrad_trainer.rewards.config import RewardSettings
from tracegrad_trainer.utils.subprocesses import die_with_parent
from tracegrad_trainer.utils.worker_process import run_worker

# Run with -m, where __name__ is "__main__".
logger = logging.getLogger("tracegrad_trainer.promotion.evaluator")

LOOK_EVERY_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
_STOP_S = 20.0  # for a run's agents to be ended
# Of `tracegrad run`: all attempts were scored, or some could not be.
_RAN = (0, 1)


def check_tasks(settings: PromotionSettings) -> None:
    """Raises ValueError: the tasks cannot be run."""
    if settings.tasks is None:
        return
    defaults = TaskDefaults(command=settings.command or None, agent=settings.agent)
    try:
        load_tasks(settings.tasks, defaults)
    except (ValueError, OSError) as error:
        raise ValueError(f"promotion.tasks: {error}") from None


def run_command(settings: PromotionSettings, version: int, logs: Path) -> list[str]:
    """Of one pass over the tasks."""
    command = [sys.executable, "-m", "tracegrad.cli", "run", str(settings.tasks), "--eval"]
    command += ["--tag", f"{VERSION_TAG}={version}", "--logs", str(logs)]
    command += ["--agent", settings.agent] if settings.agent is not None else []
    return command + (["--", *settings.command] if settings.command else [])


@dataclass(slots=True)
class EvaluatorTotals:
    """Since the start of this process. `failed`: passes that did not run; `error` is the last
    one's."""

    passes: int = 0
    failed: int = 0
    error: str | None = None


class Evaluator:
    """`wanted`: the version whose rollouts are wanted now, or None."""

    def __init__(
        self,
        wanted: Callable[[], int | None],
        command: Callable[[int], Sequence[str]],
        say: Callable[[int | None, EvaluatorTotals], None],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._wanted = wanted
        self._command = command
        self._say = say
        self._sleep = sleep
        self.totals = EvaluatorTotals()

    async def run(self) -> None:
        """Until it is cancelled. Raises StoreError."""
        pause = FIRST_PAUSE_S
        while True:
            version = await self._look()
            if version is None:
                await self._sleep(LOOK_EVERY_S)
            elif await self.evaluate(version):
                pause = FIRST_PAUSE_S
            else:
                await self._pause(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    async def evaluate(self, version: int) -> bool:
        """One pass over the tasks, cut short once nothing more is wanted of that version. Whether
        it ran."""
        process = await asyncio.create_subprocess_exec(
            *self._command(version),
            stdin=asyncio.subprocess.DEVNULL,
            preexec_fn=_ended_with_us,
        )
        ended = asyncio.ensure_future(process.wait())
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=LOOK_EVERY_S)
                if not ended.done() and await self._look() != version:
                    return True
        finally:
            await _end(process, ended)
        code = ended.result()
        self.totals.passes += 1
        if code in _RAN:
            return True
        self.totals.failed += 1
        self.totals.error = f"`tracegrad run` ended with exit code {code}: see logs/{EVALUATOR}.log"
        logger.warning("version %d: %s", version, self.totals.error)
        return False

    async def _look(self) -> int | None:
        try:
            found = await asyncio.to_thread(self._wanted)
        except StoreUnavailable as error:
            logger.warning("the store is away, and is looked at again: %s", error)
            found = None
        self._say(found, self.totals)
        return found

    async def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await self._look()  # a sign of life
            await self._sleep(min(LOOK_EVERY_S, seconds))


def _ended_with_us() -> None:
    """In the child: the runner ends its agents on it."""
    die_with_parent(signal.SIGTERM)


async def _end(process: asyncio.subprocess.Process, ended: asyncio.Future[int]) -> None:
    if ended.done():
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await asyncio.wait({ended}, timeout=_STOP_S)
    if not ended.done():
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await ended


async def work(evaluator: Evaluator, stop: asyncio.Event) -> None:
    """Until `stop`. Raises StoreError."""
    ending = asyncio.create_task(stop.wait())
    running = asyncio.create_task(evaluator.run())
    await asyncio.wait({ending, running}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    for task in (ending, running):
        task.cancel()
    await asyncio.gather(ending, running, return_exceptions=True)


def gate_of(resolved: dict[str, Any], store: Store) -> PromotionGate:
    """As rank 0 has it, of the resolved settings as JSON."""
    return PromotionGate(
        PromotionSettings.model_validate(resolved["promotion"]),
        store,
        data=DataSettings.model_validate(resolved["data"]),
        rewards=RewardSettings.model_validate(resolved["rewards"]),
    )


async def _work(resolved: dict[str, Any], stop: asyncio.Event) -> None:
    settings = PromotionSettings.model_validate(resolved["promotion"])
    state_dir = Path(resolved["state_dir"])
    state = RunState(state_dir, EVALUATOR)

    def say(version: int | None, totals: EvaluatorTotals) -> None:
        state.update(
            stage="waiting" if version is None else "evaluating",
            version=version,
            passes=totals.passes,
            failed=totals.failed,
            error=totals.error,
        )

    with Store.open(unmasked(resolved["proxy"]["store"])) as store:
        gate = gate_of(resolved, store)
        evaluator = Evaluator(
            lambda: gate.gathers(store.version_history()),
            lambda version: run_command(settings, version, state_dir / "evaluations"),
            say,
        )
        await work(evaluator, stop)


if __name__ == "__main__":
    sys.exit(run_worker(EVALUATOR, _work))
