"""`tracegrad rollouts ls | show | tree | explain | time | pass | export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from tracegrad.atomic_file import atomic_write
from tracegrad.chat.model import NotReproducible
from tracegrad.chat.token_pieces import token_reader
from tracegrad.cli.options import with_rollout_filter
from tracegrad.cli.render.console import Terminal
from tracegrad.cli.render.explanation import (
    explanation_json,
    reason_counts_json,
    render_explanation,
    render_reason_counts,
)
from tracegrad.cli.render.json import detail_json, indexed_turn_json, summary_json
from tracegrad.cli.render.pass_rates import pass_rate_json, render_pass_rates
from tracegrad.cli.render.rollout import render_one_turn, render_rollout
from tracegrad.cli.render.rollout_list import render_rollouts
from tracegrad.cli.render.rollout_time import render_time, render_times, time_json, times_json
from tracegrad.cli.render.task_list import render_tasks, task_json
from tracegrad.cli.render.tree import render_tree, tree_json
from tracegrad.cli.store_option import (
    NO_SUCH_ROLLOUT,
    JsonOption,
    StoreOption,
    fail,
    open_store,
    print_json,
)
from tracegrad.inspect.display_text import one_line
from tracegrad.inspect.pass_rates import pass_rates, useful_ks
from tracegrad.inspect.rollout_time import time_of
from tracegrad.inspect.turn_standing import RewardStandings
from tracegrad.store import ALL, RolloutDetail, RolloutFilter, Store
from tracegrad.store.read.attempts import Attempt, iterate_attempts
from tracegrad.store.read.reason_counts import count_reasons
from tracegrad.store.read.rollout_moments import find_moments, load_moments
from tracegrad.store.read.rollouts import (
    RolloutOrder,
    list_ordered,
    resolve_rollout,
    summarize_tasks,
)
from tracegrad.store.read.task_titles import load_inputs
from tracegrad.text_format import format_count

EXPORT_FAILED, TOO_DEEP = 1, 3

app = typer.Typer(help="Look at rollouts.", no_args_is_help=True)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="A rollout's id or its beginning.")]


@app.command("ls")
@with_rollout_filter
def list_command(
    store: StoreOption = None,
    which: RolloutFilter = ALL,
    sort: Annotated[RolloutOrder, typer.Option(help="What comes first.")] = RolloutOrder.NEWEST,
    by_task: Annotated[
        bool, typer.Option("--by-task", help="One line a task: its rollouts compared.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List rollouts, the newest first."""
    if by_task and sort not in (RolloutOrder.NEWEST, RolloutOrder.REWARD):
        raise typer.BadParameter("tasks are sorted by newest or reward", param_hint="--sort")
    with open_store(store) as reading:
        if by_task:
            _list_tasks(reading, which, sort, limit, as_json=as_json)
        else:
            _list_rollouts(reading, which, sort, limit, as_json=as_json)


def _list_rollouts(
    store: Store, which: RolloutFilter, sort: RolloutOrder, limit: int, *, as_json: bool
) -> None:
    # One more than asked for shows whether there are more.
    with store.reading() as connection:
        rows = list_ordered(connection, which, sort, limit + 1)
        shown = rows[:limit]
        asked = load_inputs(connection, [row.rollout_id for row in shown])
    if as_json:
        print_json([summary_json(row, asked.get(row.rollout_id)) for row in shown])
        return
    screen = Terminal()
    if not shown:
        screen.print([_none(which)])
        return
    screen.print(render_rollouts(shown, asked, screen.width))
    if len(rows) > limit:
        first = "newest" if sort is RolloutOrder.NEWEST else f"first by {sort}"
        screen.print([Text(f"the {limit} {first}; more with --limit", style="dim")])


def _list_tasks(
    store: Store, which: RolloutFilter, sort: RolloutOrder, limit: int, *, as_json: bool
) -> None:
    with store.reading() as connection:
        every = summarize_tasks(connection, which, sort)
        asked = load_inputs(connection, [task.last_rollout_id for task in every[:limit]])
    if as_json:
        print_json([task_json(task, asked) for task in every[:limit]])
        return
    screen = Terminal()
    if not every:
        screen.print([_none(which)])
        return
    screen.print(render_tasks(every[:limit], asked, screen.width))
    if len(every) > limit:
        more = f"{limit} of {format_count(len(every), 'task')}; more with --limit"
        screen.print([Text(more, style="dim")])


def _none(which: RolloutFilter) -> Text:
    return Text("no rollouts" + (" yet" if which.matches_all else " match"))


@app.command("show")
def show_command(
    rollout: IdArgument,
    store: StoreOption = None,
    turn: Annotated[
        int | None, typer.Option("--turn", metavar="N", help="One turn, whole; -1 is the last.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With token ids and log-probabilities.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten long messages.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what happened in one rollout, turn by turn."""
    with open_store(store) as reading:
        detail = reading.rollout(rollout)
    screen = Terminal()
    if turn is None:
        if as_json:
            print_json(detail_json(detail, tokens=tokens))
        else:
            screen.print(render_rollout(detail, screen.width, tokens=tokens, full=full))
        return
    index = _turn_of(detail, turn)
    if as_json:
        print_json(indexed_turn_json(index, detail, RewardStandings(detail), tokens=tokens))
    else:
        screen.print(render_one_turn(detail, index, screen.width, tokens=tokens))


def _turn_of(detail: RolloutDetail, turn: int) -> int:
    turns = len(detail.turns)
    if not -turns <= turn < turns:
        there = f"{format_count(turns, 'turn')}" + (f", 0 to {turns - 1}" if turns else "")
        fail(f"no turn {turn}: rollout {detail.summary.rollout_id} has {there}", NO_SUCH_ROLLOUT)
    return turn % turns


@app.command("export")
def export_command(
    rollout: IdArgument,
    html: Annotated[
        bool, typer.Option("--html", help="As the web page shows it, in one file.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Instead of the screen.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The model's folder: tokens as texts.")
    ] = None,
    store: StoreOption = None,
) -> None:
    """Write one rollout as a file that opens in a browser, offline."""
    if not html:
        fail("say --html; `tracegrad export` writes JSONL and Parquet", EXPORT_FAILED)
    # Templates are slow to import, and no other command needs them.
    from tracegrad.ui.single_file import rollout_html

    try:
        read = None if tokenizer is None else token_reader(tokenizer)
    except NotReproducible as error:
        raise typer.BadParameter(str(error), param_hint="--tokenizer") from None
    with open_store(store) as reading:
        page = rollout_html(reading, rollout, read=read).encode()
    if output is None:
        sys.stdout.buffer.write(page)
        return
    with atomic_write(output) as file:
        file.write(page)
    typer.echo(f"wrote {output}", err=True)


@app.command("tree")
def tree_command(
    rollout: IdArgument, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Draw which turn continues which: forks, samples, sub-agents."""
    with open_store(store) as reading:
        detail = reading.rollout(rollout)
    screen = Terminal()
    if as_json:
        try:
            print_json(tree_json(detail))
        except RecursionError:
            fail(
                "the tree forks too deep for JSON; `show --json` names each turn's parent", TOO_DEEP
            )
    else:
        screen.print(render_tree(detail, screen.width))


@app.command("explain")
@with_rollout_filter
def explain_command(
    rollout: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="A rollout's id or its beginning; else all, counted."),
    ] = None,
    store: StoreOption = None,
    which: RolloutFilter = ALL,
    as_json: JsonOption = False,
) -> None:
    """Say why a tree forked and why its turns are not trained.

    Without ID: of all rollouts, counted.
    """
    if rollout is not None and not which.matches_all:
        raise typer.BadParameter("name a rollout or filter them, not both", param_hint="ID")
    screen = Terminal()
    with open_store(store) as opened:
        if rollout is None:
            with opened.reading() as connection:
                counts = count_reasons(connection, which)
        else:
            detail = opened.rollout(rollout)
    if rollout is not None:
        if as_json:
            print_json(explanation_json(detail))
        else:
            screen.print(render_explanation(detail, screen.width))
    elif as_json:
        print_json(reason_counts_json(counts))
    else:
        screen.print(
            render_reason_counts(counts, screen.width) if counts.rollouts else [_none(which)]
        )


@app.command("time")
@with_rollout_filter
def time_command(
    rollout: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="A rollout's id or its beginning; else all, in sum."),
    ] = None,
    store: StoreOption = None,
    which: RolloutFilter = ALL,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 1000,
    as_json: JsonOption = False,
) -> None:
    """Say where the seconds went: calls, tools, training.

    Without ID: of all rollouts, as shares, means and 95th percentiles.
    """
    if rollout is not None and not which.matches_all:
        raise typer.BadParameter("name a rollout or filter them, not both", param_hint="ID")
    if rollout is not None:
        _time_one(store, rollout, as_json=as_json)
        return
    with open_store(store) as opened, opened.reading() as connection:
        # One more than asked for shows whether there are more.
        found = find_moments(connection, which, limit=limit + 1)
    times = [time_of(each) for each in found[:limit]]
    screen = Terminal()
    if as_json:
        print_json(times_json(times))
    elif not times:
        screen.print([_none(which)])
    else:
        screen.print(render_times(times, screen.width, more=len(found) > limit))


def _time_one(store: str | None, rollout: str, *, as_json: bool) -> None:
    with open_store(store) as opened, opened.reading() as connection:
        [moments] = load_moments(connection, [resolve_rollout(connection, rollout)])
    time = time_of(moments)
    if as_json:
        print_json(time_json(time))
        return
    screen = Terminal()
    title = Text.assemble(("rollout ", "dim"), (one_line(time.rollout_id), "bold cyan"))
    screen.print(render_time(time, title, screen.width))


# Least reward of an attempt that solved its task, as the trainer's guards have it.
SOLVED_FROM = 0.5
_BY = ("version", "task", "agent")
_UNNAMED = "(none)"


@app.command("pass")
@with_rollout_filter
def pass_command(
    store: StoreOption = None,
    which: RolloutFilter = ALL,
    by: Annotated[
        str, typer.Option(metavar="WHAT", help="version, task, agent or tag:KEY.")
    ] = "version",
    k: Annotated[
        str | None,
        typer.Option(metavar="K,K", help="Attempts of pass@k; default: 1, 4 and 8, where made."),
    ] = None,
    success: Annotated[
        float, typer.Option(help="Least reward of an attempt that succeeded.")
    ] = SOLVED_FROM,
    limit: Annotated[int, typer.Option(min=1, help="At most so many lines.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Say how often attempts succeed, and at what cost: pass@k.

    Of rollouts that ended by their own doing. What nobody rewarded is unknown, and in no figure.
    """
    kind, _, tag = by.partition(":")
    if not (by in _BY or (kind == "tag" and tag)):
        raise typer.BadParameter(f"{by!r}; use {', '.join(_BY)} or tag:KEY", param_hint="--by")
    wanted = _ks(k)

    def name_of(attempt: Attempt) -> str | int | None:
        if by == "version":
            return attempt.version
        if by == "task":
            return attempt.task_id
        return attempt.agent if by == "agent" else attempt.tag

    with open_store(store) as opened, opened.reading() as connection:
        attempts = iterate_attempts(connection, which, tag=tag or None)
        found = pass_rates(attempts, name_of, success=success)
    ks = useful_ks(found.values(), wanted)
    names = sorted(found, key=lambda name: (name is None, _order(name, found[name].attempts)))
    if as_json:
        print_json([pass_rate_json(name, found[name], by, ks) for name in names])
        return
    screen = Terminal()
    if not found:
        screen.print([_none(which)])
        return
    shown = {_UNNAMED if name is None else str(name): found[name] for name in names[:limit]}
    lines = render_pass_rates(shown, by, ks, screen.width)
    if len(names) > limit:
        lines.append(Text(f"… and {len(names) - limit} more (--limit)", style="dim"))
    screen.print(lines)


def _order(name: str | int | None, attempts: int) -> tuple[int, str]:
    """The newest version, or else what was tried most, first."""
    return (-name, "") if isinstance(name, int) else (-attempts, name or "")


def _ks(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{text!r}; write whole numbers, such as 1,4,8", param_hint="--k")
    return found
