"""What commands that take something out of the store have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer
from humanize import naturalsize

from tracegrad.cli.render.console import clear_progress, show_progress
from tracegrad.cli.store_option import USAGE_ERROR, JsonOption, fail
from tracegrad.events import Json
from tracegrad.store import Store
from tracegrad.store.databases.upkeep import upkeep_of
from tracegrad.store.read.rollouts import resolve_rollout

PARTLY_DONE = 1

T = TypeVar("T")

RolloutOption = Annotated[
    list[str] | None,
    typer.Option("--rollout", metavar="ID", help="Only this rollout; may be repeated."),
]


@dataclass(frozen=True, slots=True)
class RemovalOptions:
    """The options of such a command (`options.with_options`), and what they decide."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False
    vacuum: Annotated[bool, typer.Option(help="Give room back to the disk afterwards.")] = True
    as_json: JsonOption = False

    def confirm(self, question: str) -> None:
        if self.yes:
            return
        if not is_interactive():
            fail(
                "nobody is here to ask: --yes does it without asking, --dry-run only says what",
                USAGE_ERROR,
            )
        typer.confirm(question, abort=True)

    def reclaim_space(
        self, store: Store, *, changed: bool, whole: bool = False
    ) -> dict[str, Any] | None:
        if not (self.vacuum and changed):
            return None
        room = upkeep_of(store.database).reclaim(whole=whole)
        return {"before": room.before, "after": room.after, "note": room.note}


def with_progress(work: Callable[[Callable[[Json], None]], T]) -> T:
    """`work` reports its counts so far."""
    try:
        return work(lambda counts: show_progress(f"{counts['rollouts']:,} rollouts"))
    finally:
        clear_progress()


def resolve_ids(store: Store, prefixes: Sequence[str]) -> tuple[str, ...]:
    with store.reading() as connection:
        return tuple(resolve_rollout(connection, prefix) for prefix in prefixes)


def is_interactive() -> bool:
    return sys.stdin.isatty()


def print_reclaimed(room: dict[str, Any] | None) -> None:
    if room is None:
        return
    typer.echo(f"files: {naturalsize(room['before'])} before, {naturalsize(room['after'])} now")
    if room["note"]:
        typer.echo(room["note"], err=True)
