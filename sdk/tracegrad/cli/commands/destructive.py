"""What commands that take something out of the store have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from tracegrad.cli.store_option import fail
from tracegrad.events import Json
from tracegrad.store import Store
from tracegrad.store.databases.upkeep import upkeep_of
from tracegrad.store.read.rollouts import resolve_rollout

PARTLY_DONE, USAGE_ERROR = 1, 2

RolloutOption = Annotated[
    list[str] | None,
    typer.Option("--rollout", metavar="ID", help="Only this rollout; may be repeated."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
VacuumOption = Annotated[
    bool, typer.Option("--vacuum/--no-vacuum", help="Give room back to the disk afterwards.")
]


def resolve_ids(store: Store, prefixes: Sequence[str]) -> tuple[str, ...]:
    with store.reading() as connection:
        return tuple(resolve_rollout(connection, prefix) for prefix in prefixes)


def format_size(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def confirm(question: str, yes: bool) -> None:
    if yes:
        return
    if not is_interactive():
        fail(
            "nobody is here to ask: --yes does it without asking, --dry-run only says what",
            USAGE_ERROR,
        )
    typer.confirm(question, abort=True)


def is_interactive() -> bool:
    return sys.stdin.isatty()


def make_progress(what: str) -> Callable[[Json], None]:
    """On a terminal only: scripts want the end."""

    def say(counts: Json) -> None:
        if sys.stderr.isatty():
            typer.echo(f"\r{counts[what]:,} {what} …", nl=False, err=True)

    return say


def end_progress() -> None:
    if sys.stderr.isatty():
        typer.echo("\r\x1b[K", nl=False, err=True)


def reclaim_space(store: Store, *, vacuum: bool, whole: bool = False) -> dict[str, Any] | None:
    if not vacuum:
        return None
    room = upkeep_of(store.database).reclaim(whole=whole)
    return {"before": room.before, "after": room.after, "note": room.note}


def print_reclaimed(room: dict[str, Any] | None) -> None:
    if room is None:
        return
    typer.echo(f"files: {format_size(room['before'])} before, {format_size(room['after'])} now")
    if room["note"]:
        typer.echo(room["note"], err=True)
