"""`tracegrad run`: a command becomes a rollout, or a group of them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tracegrad import exporter
from tracegrad.call_check import question
from tracegrad.cli.commands.destructive import USAGE_ERROR
from tracegrad.cli.commands.score import NO_PROXY
from tracegrad.cli.store_option import JsonOption, fail, print_json
from tracegrad.context import proxy_url
from tracegrad.intake_client import intake
from tracegrad.private_files import private_folder
from tracegrad.protocol import EVENTS_PATH
from tracegrad.runner.attempt import Attempt, RewardSource, RunSpec, run_group
from tracegrad.transport import ProxyRefused, ProxyUnreachable, post_json

TIMED_OUT, NOT_FOUND, INTERRUPTED = 124, 127, 130


def run_command(
    command: Annotated[
        list[str], typer.Argument(metavar="CMD...", help="The agent's command, behind --.")
    ],
    attempts: Annotated[
        int, typer.Option("-n", "--attempts", min=1, help="Rollouts of it: one group.")
    ] = 1,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Side by side, at most; default: all.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="The task's id; else a hash of the command.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="The agent's name; else the command's first word.")
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="May be repeated.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="Seconds of each attempt.")
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
    logs: Annotated[Path, typer.Option(help="A folder for what is printed.")] = Path(
        ".tracegrad/run"
    ),
    as_json: JsonOption = False,
) -> None:
    """Run any command as a rollout, or as a group of them.

    Its LLM calls lead to the proxy at $TRACEGRAD_URL: OPENAI_BASE_URL, ANTHROPIC_BASE_URL and the
    like, and keys, are in its environment. How it ends is the rollout's outcome. Waits for the
    trainer's pace, where one runs.
    """
    if reward_from not in ("exit_code", "last_line"):
        fail(f"--reward-from: {reward_from!r} is not exit_code or last_line", USAGE_ERROR)
    source: RewardSource = "last_line" if reward_from == "last_line" else "exit_code"
    spec = RunSpec(
        command=tuple(command),
        task_id=task or _command_hash(command),
        agent=agent or Path(command[0]).name,
        tags=_tags(tag or []),
        timeout_s=timeout,
        reward=reward,
        reward_source=source,
        workspace=workspace,
        logs=private_folder(logs / time.strftime("%Y-%m-%dT%H-%M-%S")),
    )
    _check_proxy()
    done = _Finished(alone=attempts == 1, total=attempts, as_json=as_json)
    try:
        asyncio.run(_run(spec, attempts, concurrency or attempts, done))
    except asyncio.CancelledError:
        pass
    finally:
        exporter.flush()
    raise typer.Exit(done.exit_code())


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


async def _run(spec: RunSpec, attempts: int, concurrency: int, done: _Finished) -> None:
    loop, running = asyncio.get_running_loop(), asyncio.current_task()
    assert running is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, done.interrupt, running)
    await intake(attempts)
    echo = sys.stderr.buffer.write if done.alone else None
    await run_group(spec, attempts, concurrency=concurrency, finished=done.add, echo=echo)


class _Finished:
    """Attempts as they are done, and what is said of them."""

    def __init__(self, *, alone: bool, total: int, as_json: bool) -> None:
        self.alone, self._total, self._as_json = alone, total, as_json
        self._attempts: list[Attempt] = []
        self._interrupted = False

    def interrupt(self, running: asyncio.Task[None]) -> None:
        """The first one: agents are ended, and their rollouts are aborted."""
        if not self._interrupted:
            self._interrupted = True
            running.cancel()

    def add(self, attempt: Attempt) -> None:
        self._attempts.append(attempt)
        if self._as_json:
            print_json(asdict(attempt) | {"logs": str(attempt.logs)})
        else:
            typer.echo(describe(attempt, len(self._attempts), self._total))
            if len(self._attempts) == self._total and not self.alone:
                typer.echo(summary(self._attempts))

    def exit_code(self) -> int:
        """Of one attempt the command's own; of several 1 where one is not the policy's doing."""
        if self._interrupted:
            return INTERRUPTED
        if not self.alone:
            return 0 if all(one.outcome.scored for one in self._attempts) else 1
        only = self._attempts[0]
        if only.exit_code is None:
            return TIMED_OUT if only.outcome in ("budget", "infra_error") else NOT_FOUND
        return only.exit_code if only.exit_code >= 0 else 128 - only.exit_code


def describe(attempt: Attempt, number: int, total: int) -> str:
    """`3/8  completed  reward 1  5 calls  12.3 s  ROLLOUT`"""
    reward = "unknown" if attempt.reward is None else f"{attempt.reward:g}"
    calls = "calls unknown" if attempt.calls is None else f"{attempt.calls} calls"
    parts = [f"{attempt.outcome}", f"reward {reward}", calls, f"{attempt.seconds:.1f} s"]
    line = "  ".join([f"{number}/{total}", *parts, attempt.rollout_id])
    return line if attempt.reason is None else f"{line}\n     {attempt.reason}"


def summary(attempts: Sequence[Attempt]) -> str:
    known = [one.reward for one in attempts if one.reward is not None]
    unscored = sum(not one.outcome.scored for one in attempts)
    mean = f"mean reward {sum(known) / len(known):.3g} of {len(known)}" if known else "no reward"
    left = f"; {unscored} not the agent's doing, and not scored" if unscored else ""
    return f"{len(attempts)} rollouts: {mean}{left}"
