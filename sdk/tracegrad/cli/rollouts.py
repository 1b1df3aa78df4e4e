"""`tracegrad rollouts ls | show`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from tracegrad.cli.listing import rollout_table
from tracegrad.cli.objects import detail_object, row_object
from tracegrad.cli.story import tell
from tracegrad.records import Outcome
from tracegrad.store import (
    DEFAULT_URL,
    AmbiguousRollout,
    Store,
    StoreError,
    StoreMissing,
    UnknownRollout,
)
from tracegrad.store.packing import dump_json

NO_SUCH_ROLLOUT = 1
NO_STORE = 2

app = typer.Typer(help="Look at rollouts.", no_args_is_help=True)

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help=f"The store; else $TRACEGRAD_STORE, else {DEFAULT_URL}.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@app.command("ls")
def list_command(
    store: StoreOption = None,
    task: Annotated[str | None, typer.Option(help="Only of this task.")] = None,
    agent: Annotated[str | None, typer.Option(help="Only of this agent.")] = None,
    outcome: Annotated[
        str | None, typer.Option(help=f"Only with this outcome: open, {', '.join(Outcome)}.")
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Only with this tag; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List rollouts, the newest first."""
    tags = _tags(tag or [])
    if outcome is not None and outcome not in ("open", *Outcome):
        raise typer.BadParameter(
            f"{outcome!r}; use open, {', '.join(Outcome)}", param_hint="--outcome"
        )
    with _reading(store) as opened:
        # One more than asked for tells whether there are more.
        rows = opened.rollouts(task=task, agent=agent, outcome=outcome, tags=tags, limit=limit + 1)
    shown = rows[:limit]
    if as_json:
        _print_json([row_object(row) for row in shown])
        return
    console = Console()
    if not shown:
        console.print("no rollouts" + (" match" if task or agent or outcome or tags else " yet"))
        return
    console.print(rollout_table(shown, console.width))
    if len(rows) > limit:
        console.print(f"[dim]the {limit} newest; more with --limit[/]")


@app.command("show")
def show_command(
    rollout: Annotated[str, typer.Argument(metavar="ID", help="A rollout's id or its beginning.")],
    store: StoreOption = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With token ids and log-probabilities.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten long messages.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Tell what happened in one rollout, turn by turn."""
    with _reading(store) as opened:
        detail = opened.rollout(rollout)
    if as_json:
        _print_json(detail_object(detail, tokens=tokens))
    else:
        console = Console(highlight=False)
        for part in tell(detail, tokens=tokens, full=full):
            console.print(part)


@contextmanager
def _reading(url: str | None) -> Iterator[Store]:
    """The store at `url`; what is wrong with it or with the question ends the command."""
    url = url or os.environ.get("TRACEGRAD_STORE") or DEFAULT_URL
    try:
        with Store.open(url, create=False) as store:
            yield store
    except (UnknownRollout, AmbiguousRollout) as error:
        _fail(str(error), NO_SUCH_ROLLOUT)
    except StoreMissing as error:
        _fail(f"{error}; name another with --store or TRACEGRAD_STORE", NO_STORE)
    except (StoreError, ValueError) as error:
        _fail(str(error), NO_STORE)


def _tags(pairs: list[str]) -> dict[str, str]:
    tags = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise typer.BadParameter(f"{pair!r}; write key=value", param_hint="--tag")
        tags[key] = value
    return tags


def _print_json(value: Any) -> None:
    typer.echo(dump_json(value))


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"tracegrad: {message}", err=True)
    raise typer.Exit(code)
