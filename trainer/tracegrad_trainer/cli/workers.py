"""`trainer workers`: the workers of `trainer serve` alone, beside ranks of a launcher of one's own.

Whatever the ranks do, they go on: rollouts are scored whether or not anybody trains just now. They
end with the command.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.run_state import RunState, is_at_work
from tracegrad_trainer.launch.session import (
    NOTHING,
    POLL_S,
    StartError,
    StopRequested,
    lock_state_folder,
    log_as_supervisor,
    on_second_signal,
    raising_on_stop_signals,
    write_resolved_settings,
)
from tracegrad_trainer.launch.supervisor import Backoff, Part, Supervisor
from tracegrad_trainer.launch.workers import wanted_workers, worker_process
from tracegrad_trainer.promotion.evaluator import check_tasks
from tracegrad_trainer.rewards.judge import judge_key
from tracegrad_trainer.utils.console import print_error
from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())  # as text, what it says is on standard output already

# Of the command's own state; and of the settings that its workers read: those of the ranks are
# theirs to write.
STATE, RESOLVED = "workers", "settings.workers.json"
READY_TIMEOUT_S = 120.0
_IDLE = (
    "trainer workers: nothing to do: no reward is composed ([rewards]), no prompt is sampled again"
    " (resample.prompts) and no task is run for the gate (promotion.tasks)"
)


def check_workers(settings: TrainerSettings) -> None:
    """Raises StartError: what is wrong with what workers are given."""
    try:
        if settings.rewards.judge is not None:
            judge_key(settings.rewards.judge)
        check_tasks(settings.promotion)
    except ValueError as error:
        raise StartError(str(error)) from None


def run_workers(settings: TrainerSettings, console: Console) -> int:
    """Until it is stopped (0), a worker does not come up, or one ends and `max_restarts` is 0 (1);
    3: the settings have work for none."""
    log_as_supervisor(settings)

    def say(line: str, level: int = logging.INFO) -> None:
        console.print(line, highlight=False, soft_wrap=True)
        log.log(level, "%s", line)

    if not wanted_workers(settings):
        say(_IDLE)
        return NOTHING
    try:
        with raising_on_stop_signals():
            check_workers(settings)
            with lock_state_folder(settings.state_dir, beside_ranks=True):
                resolved = write_resolved_settings(settings, RESOLVED)
                WorkerGroup(settings, resolved, say=say).run()
    except StopRequested as stop:
        say(f"stopped by {stop}")
    except (StartError, ChildError, OSError) as error:
        print_error(f"trainer workers: {error}", console)
        log.critical("%s", error)
        return 1
    return 0


class WorkerGroup:
    """All that the settings want, as one thing."""

    def __init__(
        self, settings: TrainerSettings, resolved: Path, *, say: Callable[..., None]
    ) -> None:
        self.settings = settings
        self.say = say
        self.state = RunState(settings.state_dir, STATE)
        names = wanted_workers(settings)
        self.children = [worker_process(name, settings, resolved) for name in names]

    def run(self) -> None:
        """Until a signal. Raises StopRequested, ChildError."""
        self.state.update(stage="starting")
        try:
            for child in self.children:
                child.log.unlink(missing_ok=True)
                child.start()
            for child in self.children:
                child.wait_until_ready(
                    partial(self._works, child), timeout_s=READY_TIMEOUT_S, tick=self._check
                )
                self.say(f"{child.name} ready (pid {child.pid})")
            self._watch()
        finally:
            on_second_signal(self._kill)
            self.state.update(stage="stopping")
            for child in self.children:
                child.stop()
            self.state.update(stage="stopped")

    def _watch(self) -> None:
        most = self.settings.max_restarts
        parts = [
            Part(child, Backoff(most), works, works, essential=False)
            for child in self.children
            for works in [partial(self._works, child)]
        ]
        supervisor = Supervisor(
            parts,
            READY_TIMEOUT_S,
            say=partial(self.say, level=logging.WARNING),
            changed=lambda: self.state.update(parts=supervisor.as_json()),
        )
        self.state.update(stage="working")
        while True:
            supervisor.tick()
            time.sleep(POLL_S)

    def _works(self, child: ChildProcess) -> bool:
        return is_at_work(self.settings.state_dir, child.name, child.pid)

    def _check(self) -> None:
        """Raises ChildError: one has ended while they start: its settings are wrong, in general."""
        for child in self.children:
            child.check()

    def _kill(self) -> None:
        for child in self.children:
            child.kill()
