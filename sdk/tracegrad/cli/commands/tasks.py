"""`tracegrad tasks ls | quarantine | release`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Literal

import typer
from rich.text import Text
from sqlalchemy import Connection

from tracegrad.cli.commands.rollouts import SOLVED_FROM
from tracegrad.cli.options import who_decides, with_options, with_rollout_filter
from tracegrad.cli.render.console import Terminal
from tracegrad.cli.render.task_health import (
    TaskRow,
    health_json,
    render_task_rows,
    task_row_json,
)
from tracegrad.cli.store_option import JsonOption, StoreOption, fail, open_store, print_json
from tracegrad.store import ALL, RolloutFilter
from tracegrad.store.ledger.quarantine import decide
from tracegrad.store.read.rollouts import RolloutOrder, summarize_tasks
from tracegrad.store.read.task_health import (
    DEFAULT_RULE,
    QuarantineRule,
    Subject,
    SubjectHealth,
    SubjectKind,
    TaskDecision,
    known_images,
    quarantined,
    subject_health,
)
from tracegrad.store.read.task_titles import load_inputs
from tracegrad.text_format import format_count

REFUSED = 1
HEALTH_STATES = ("ok", "suspect", "quarantined")

app = typer.Typer(help="Look at tasks, and set them aside.", no_args_is_help=True)


def quarantine_rule(
    *,
    failures: Annotated[
        int, typer.Option(min=1, help="Attempts that all failed, for a task to be suspect.")
    ] = DEFAULT_RULE.failures,
    equal_rewards: Annotated[
        int, typer.Option(min=2, help="Equal rewards, for a task to be suspect.")
    ] = DEFAULT_RULE.equal_rewards,
    versions: Annotated[
        int, typer.Option(min=1, help="Policy versions that these are of, at least.")
    ] = DEFAULT_RULE.versions,
) -> QuarantineRule:
    return QuarantineRule(failures=failures, equal_rewards=equal_rewards, versions=versions)


@app.command("ls")
@with_rollout_filter
@with_options(rule=quarantine_rule)
def list_command(
    store: StoreOption = None,
    which: RolloutFilter = ALL,
    health: Annotated[
        str | None,
        typer.Option(metavar="STATE", help=f"Only tasks that are {', '.join(HEALTH_STATES)}."),
    ] = None,
    rule: QuarantineRule = DEFAULT_RULE,
    success: Annotated[
        float, typer.Option(help="Least reward of an attempt that succeeded.")
    ] = SOLVED_FROM,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """List tasks: attempts, outcomes, pass rate, state and why.

    Those that are set aside come first. The filters choose the rollouts that are counted; a task's
    state is of all of its attempts.
    """
    if health is not None and health not in HEALTH_STATES:
        raise typer.BadParameter(
            f"{health!r}; use {', '.join(HEALTH_STATES)}", param_hint="--health"
        )
    with open_store(store) as opened, opened.reading() as connection:
        rows = _rows(connection, which, rule, success)
        images = _images(connection, rule)
        if health is not None:
            rows = [row for row in rows if row.health.state == health]
            images = [one for one in images if one.state == health]
        shown = rows[:limit]
        asked = load_inputs(connection, [row.summary.last_rollout_id for row in shown])
    if as_json:
        tasks = [task_row_json(row, asked) for row in shown]
        found = [{"image": one.subject.id, **health_json(one)} for one in images]
        print_json({"tasks": tasks, "images": found})
        return
    screen = Terminal()
    if not rows and not images:
        screen.print(
            [Text("no tasks" + (" yet" if which.matches_all and not health else " match"))]
        )
        return
    if rows:
        aside = [one for one in images if one.state != "ok"]
        screen.print(render_task_rows(shown, aside, asked, screen.width))
    if len(rows) > limit:
        more = f"{limit} of {format_count(len(rows), 'task')}; more with --limit"
        screen.print([Text(more, style="dim")])


def _rows(
    connection: Connection, which: RolloutFilter, rule: QuarantineRule, success: float
) -> list[TaskRow]:
    """The quarantined first, then the suspect, then by their newest rollout."""
    tasks = [
        task
        for task in summarize_tasks(connection, which, RolloutOrder.NEWEST)
        if task.task_id is not None
    ]
    subjects = [Subject("task", str(task.task_id)) for task in tasks]
    found = subject_health(connection, subjects, rule)
    rows = [TaskRow(task, one, success) for task, one in zip(tasks, found, strict=True)]
    return sorted(rows, key=lambda row: -HEALTH_STATES.index(row.health.state))


def _images(connection: Connection, rule: QuarantineRule) -> Sequence[SubjectHealth]:
    gone = [one for one in quarantined(connection) if one.kind == "image"]
    return subject_health(connection, dict.fromkeys([*known_images(connection), *gone]), rule)


_Id = Annotated[
    str, typer.Argument(metavar="ID", help="A task's id; with --image an image's name.")
]
_Image = Annotated[bool, typer.Option("--image", help="ID is an image: all tasks that run in it.")]
_Why = Annotated[str, typer.Option(metavar="TEXT", help="For people to read.")]


@app.command("quarantine")
def quarantine_command(
    subject_id: _Id,
    why: _Why,
    image: _Image = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set a task aside: the runner leaves it out."""
    _decide("quarantine", subject_id, why, image=image, store=store, as_json=as_json)


@app.command("release")
def release_command(
    subject_id: _Id,
    why: _Why,
    image: _Image = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a task be run again: what was before does not count."""
    _decide("release", subject_id, why, image=image, store=store, as_json=as_json)


def _decide(
    kind: Literal["quarantine", "release"],
    subject_id: str,
    why: str,
    *,
    image: bool,
    store: str | None,
    as_json: bool,
) -> None:
    subject: SubjectKind = "image" if image else "task"
    decision = TaskDecision(
        subject=subject,
        subject_id=subject_id,
        kind=kind,
        by=who_decides(),
        reason=why,
        created_at=time.time(),
    )
    with open_store(store) as opened:
        try:
            decide(opened, decision)
        except ValueError as error:
            fail(str(error), REFUSED)
    if as_json:
        print_json(asdict(decision))
    else:
        typer.echo(f"{subject} {subject_id}: {kind}d by {decision.by}")
