"""One `tracegrad run` whose options are read: what it shows, how it is interrupted, how it ends."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from tracegrad import exporter
from tracegrad.cli.render.run_progress import RunProgress
from tracegrad.cli.store_option import USAGE_ERROR, fail
from tracegrad.private_files import private_folder
from tracegrad.runner.agent_launcher import AgentLauncher
from tracegrad.runner.quarantine_watch import QuarantineWatch
from tracegrad.runner.run_record import RecordError, RunRecord, header_of
from tracegrad.runner.sandbox import SandboxBackend
from tracegrad.runner.sandbox_backend import image_name
from tracegrad.runner.task import Task
from tracegrad.runner.task_run import RunSettings, TaskRun, settle_lost
from tracegrad.transport import ProxyRefused

TIMED_OUT, NOT_FOUND, INTERRUPTED = 124, 127, 130


def _say(line: str) -> None:
    """Before there is a bar."""
    typer.echo(f"tracegrad: {line}", err=True)


@dataclass
class RunInvocation:
    """One call of the command. `of_file`: its tasks are a file's; `as_json`: of its output."""

    tasks: Sequence[Task]
    settings: RunSettings
    folder: Path
    resume: bool
    of_file: bool
    as_json: bool
    launcher: AgentLauncher
    backend: SandboxBackend
    interrupted: bool = False
    say: Callable[[str], object] = _say

    def run(self) -> int:
        """The exit code."""
        settings = self.settings
        header = header_of(
            self.tasks,
            attempts=settings.attempts,
            over_sample=settings.over_sample,
            epochs=settings.epochs,
            held_out=settings.held_out,
        )
        try:
            record = RunRecord.open(self.folder, header, resume=self.resume)
        except (RecordError, OSError) as error:
            fail(f"--resume: {error}" if self.resume else f"--logs: {error}", USAGE_ERROR)
        settle_lost(record.lost)
        quarantine = self._leave_out_quarantined()
        total = len(self.tasks) * settings.epochs * settings.attempts
        progress = RunProgress(
            total,
            attempts=settings.attempts,
            as_json=self.as_json,
            past=record.past,
            bar=self.of_file,
        )
        self.say = progress.say
        try:
            with progress:
                asyncio.run(self._run(record, progress, quarantine))
        except asyncio.CancelledError:
            pass
        except (ProxyRefused, RecordError) as error:
            fail(str(error), USAGE_ERROR)
        finally:
            exporter.flush()
            record.close()
        return self._end(progress)

    def _leave_out_quarantined(self) -> QuarantineWatch | None:
        """Of training tasks; for evaluation all are run."""
        if not self.of_file or self.settings.held_out:
            return None
        images = {task.id: image_name(task.sandbox) for task in self.tasks}
        found = QuarantineWatch(lambda line: self.say(line), images.get)
        found.look(images)
        self.tasks = [task for task in self.tasks if found.why(task.id) is None]
        return found

    async def _run(
        self, record: RunRecord, progress: RunProgress, quarantine: QuarantineWatch | None
    ) -> None:
        alone = progress.total == 1 and not self.of_file
        loop, running = asyncio.get_running_loop(), asyncio.current_task()
        assert running is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # `nohup` has the end of the terminal ignored. SIGINT is, too, of a shell's background
            # job, but who sends it means it.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._interrupt, running)
        await TaskRun(
            self.tasks,
            self.settings,
            self.backend,
            logs=private_folder(self.folder),
            record=record,
            prepare=self.launcher,
            observer=progress,
            quarantine=quarantine,
            not_needed=progress.not_needed,
            echo=sys.stderr.buffer.write if alone else None,
            said=progress.say,
        ).run()

    def _interrupt(self, running: asyncio.Task[None]) -> None:
        """The first one: agents are ended, and their rollouts are aborted."""
        if not self.interrupted:
            self.interrupted = True
            running.cancel()

    def _end(self, progress: RunProgress) -> int:
        """Of one attempt the command's own exit code; else 1 where a group is not filled."""
        made = progress.attempts_made
        alone = not self.of_file and self.settings.attempts == 1
        if not self.as_json and not alone:
            typer.echo(progress.summary())
        if self.interrupted:
            if self.of_file and not self.as_json:
                again = f"tracegrad run --resume {shlex.quote(str(self.folder))} …"
                typer.echo(f"interrupted; go on with the same options: {again}", err=True)
            return INTERRUPTED
        if not alone:
            return 0 if progress.tally.scored >= progress.total else 1
        if not made:  # it had ended before
            return 0
        only = made[-1]
        if only.exit_code is None:
            ran = "agent" in only.seconds
            return TIMED_OUT if ran and only.outcome != "env_error" else NOT_FOUND
        return only.exit_code if only.exit_code >= 0 else 128 - only.exit_code
