"""`tracegrad run`: a command becomes a rollout or a group of them; a task file, a run."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tracegrad import exporter
from tracegrad.call_check import question
from tracegrad.cli.commands.destructive import USAGE_ERROR
from tracegrad.cli.commands.score import NO_PROXY
from tracegrad.cli.render.run_progress import RunProgress
from tracegrad.cli.store_option import JsonOption, fail
from tracegrad.context import proxy_url
from tracegrad.private_files import private_folder
from tracegrad.protocol import EVENTS_PATH
from tracegrad.runner.local_sandbox import LocalSandboxes
from tracegrad.runner.run_record import RecordError, RunRecord, header_of
from tracegrad.runner.sandbox import SandboxSpec
from tracegrad.runner.stage_limits import StageTimeouts
from tracegrad.runner.task import RewardSource, Task
from tracegrad.runner.task_files import TaskDefaults, TaskFileError, load_tasks
from tracegrad.runner.task_run import RunSettings, TaskRun, settle_lost
from tracegrad.transport import ProxyRefused, ProxyUnreachable, post_json

TIMED_OUT, NOT_FOUND, INTERRUPTED = 124, 127, 130
_FILE_CONCURRENCY, _FILE_RETRIES, _FILE_HEARTBEAT_S = 8, 2, 1800.0
_COMMAND_KEY = "tracegrad.run.command"


class RunCommand(TyperCommand):
    """What stands behind -- is the agent's command, whatever it looks like."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[_COMMAND_KEY] = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- CMD...]"]


def run_command(
    ctx: typer.Context,
    tasks: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TASKS]",
            show_default=False,
            help="A file with a task a line (JSON), a Harbor task's folder, or a folder of those.",
        ),
    ] = None,
    attempts: Annotated[
        int, typer.Option("-n", "--attempts", min=1, help="Rollouts of each task: one group.")
    ] = 1,
    over_sample: Annotated[
        int, typer.Option(min=0, help="Attempts beyond them; the slowest are cut.")
    ] = 0,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Agents side by side, at most; default: 8, of a command all."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often each task is a group.")] = 1,
    held_out: Annotated[
        bool, typer.Option("--eval", help="Held-out rollouts: never trained, and never waiting.")
    ] = False,
    task: Annotated[
        str | None, typer.Option(help="A command's task id; else a hash of the command.")
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(help="Whose recipe is run; of a command its name, else its first word."),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="May be repeated.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="Seconds of each agent.")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="For the shell, after each attempt, where that ran."),
    ] = None,
    reward_from: Annotated[
        str,
        typer.Option(
            metavar="WHAT", help="exit_code: 1 for 0, 0 for 1; last_line: the number printed last."
        ),
    ] = "exit_code",
    workspace: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Each attempt runs in a copy of this folder."
        ),
    ] = None,
    retries: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Replacements for each attempt that failed by no doing of the agent; default: 2, "
            "of a command none.",
        ),
    ] = None,
    heartbeat: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="S",
            help="Ends agents that print nothing and finish no LLM call for so long; 0: none; "
            "default: 1800, of a command none.",
        ),
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(min=0, metavar="S", help="Seconds of each sandbox's start.")
    ] = 600.0,
    resume: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Go on with the run that has this folder of logs."
        ),
    ] = None,
    logs: Annotated[Path, typer.Option(help="A folder for runs' records and output.")] = Path(
        ".tracegrad/run"
    ),
    as_json: JsonOption = False,
) -> None:
    """Run any command as a rollout, or as a group of them; or the tasks of a file.

    Its LLM calls lead to the proxy at $TRACEGRAD_URL: OPENAI_BASE_URL, ANTHROPIC_BASE_URL and the
    like, and keys, are in its environment. How it ends is the rollout's outcome. Waits for the
    trainer's pace, where one runs.
    """
    if reward_from not in ("exit_code", "last_line"):
        fail(f"--reward-from: {reward_from!r} is not exit_code or last_line", USAGE_ERROR)
    source: RewardSource = "last_line" if reward_from == "last_line" else "exit_code"
    command = tuple(ctx.meta.get(_COMMAND_KEY, ()))
    defaults = TaskDefaults(
        command=command or None,
        agent=agent,
        timeout_s=timeout,
        reward=reward,
        reward_source=source,
        workspace=workspace,
        tags=_tags(tag or []),
    )
    of_file = tasks is not None
    found = _loaded(tasks, defaults) if tasks is not None else [_one_task(defaults, task)]
    silent_s = (_FILE_HEARTBEAT_S if of_file else None) if heartbeat is None else heartbeat
    asked = RunSettings(
        attempts=attempts,
        over_sample=over_sample,
        concurrency=concurrency or (_FILE_CONCURRENCY if of_file else attempts + over_sample),
        epochs=epochs,
        retries=retries if retries is not None else _FILE_RETRIES if of_file else 0,
        held_out=held_out,
        timeouts=StageTimeouts(start_s=start_timeout or None, silent_s=silent_s or None),
    )
    _check_proxy()
    folder = resume or logs / time.strftime("%Y-%m-%dT%H-%M-%S")
    invocation = _Invocation(found, asked, folder, resume is not None, of_file, as_json)
    raise typer.Exit(invocation.run())


def _loaded(path: Path, defaults: TaskDefaults) -> list[Task]:
    if not path.exists():
        fail(f"TASKS: there is no {path}; put -- before a command", USAGE_ERROR)
    try:
        return load_tasks(path, defaults)
    except TaskFileError as error:
        fail(str(error), USAGE_ERROR)


def _one_task(defaults: TaskDefaults, task_id: str | None) -> Task:
    if defaults.command is None:
        fail("CMD: there is none; give one behind --, or a file of tasks", USAGE_ERROR)
    command = defaults.command
    return Task(
        id=task_id or _command_hash(command),
        command=command,
        agent=defaults.agent or Path(command[0]).name,
        sandbox=SandboxSpec(workspace=defaults.workspace),
        tags=defaults.tags or {},
        timeout_s=defaults.timeout_s,
        reward=defaults.reward,
        reward_source=defaults.reward_source or "exit_code",
    )


def _command_hash(command: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([*command]).encode()).hexdigest()[:16]


def _tags(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not key:
            fail(f"--tag: {each!r} is not KEY=VALUE", USAGE_ERROR)
        found[key] = value
    return found


def _check_proxy() -> None:
    """Before an agent runs for nobody."""
    try:
        url = proxy_url()
        post_json(url, EVENTS_PATH, question([]), {})
    except (ProxyRefused, ValueError) as error:
        fail(str(error), USAGE_ERROR)
    except ProxyUnreachable as error:
        fail(f"no proxy at {url}: {error}; start `tracegrad proxy`, or set TRACEGRAD_URL", NO_PROXY)


@dataclass
class _Invocation:
    """One call of the command."""

    tasks: Sequence[Task]
    settings: RunSettings
    folder: Path
    resume: bool
    of_file: bool
    as_json: bool
    interrupted: bool = False

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
        total = len(self.tasks) * settings.epochs * settings.attempts
        progress = RunProgress(
            total,
            attempts=settings.attempts,
            as_json=self.as_json,
            past=record.past,
            bar=self.of_file,
        )
        try:
            with progress:
                asyncio.run(self._run(record, progress, alone=total == 1 and not self.of_file))
        except asyncio.CancelledError:
            pass
        except ProxyRefused as error:
            fail(str(error), USAGE_ERROR)
        finally:
            exporter.flush()
            record.close()
        return self._end(progress)

    async def _run(self, record: RunRecord, progress: RunProgress, *, alone: bool) -> None:
        loop, running = asyncio.get_running_loop(), asyncio.current_task()
        assert running is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt, running)
        await TaskRun(
            self.tasks,
            self.settings,
            LocalSandboxes(shared=None if self.of_file else Path.cwd()),
            logs=private_folder(self.folder),
            record=record,
            observer=progress,
            echo=sys.stderr.buffer.write if alone else None,
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
            return TIMED_OUT if only.outcome in ("budget", "infra_error") else NOT_FOUND
        return only.exit_code if only.exit_code >= 0 else 128 - only.exit_code
