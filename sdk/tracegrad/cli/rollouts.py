"""`tracegrad rollouts ls | show`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from tracegrad.cli.listing import rollout_table
from tracegrad.cli.objects import detail_object, row_object
from tracegrad.cli.opening import JsonOption, StoreOption, opened, print_json
from tracegrad.cli.story import tell
from tracegrad.cli.wanted import (
    AgentOption,
    MaxRewardOption,
    MaxVersionOption,
    MinRewardOption,
    MinVersionOption,
    OutcomeOption,
    SinceOption,
    TagOption,
    TaskOption,
    UntilOption,
    wanted,
)

app = typer.Typer(help="Look at rollouts.", no_args_is_help=True)


@app.command("ls")
def list_command(
    store: StoreOption = None,
    task: TaskOption = None,
    agent: AgentOption = None,
    outcome: OutcomeOption = None,
    tag: TagOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    min_reward: MinRewardOption = None,
    max_reward: MaxRewardOption = None,
    min_version: MinVersionOption = None,
    max_version: MaxVersionOption = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List rollouts, the newest first."""
    which = wanted(
        task=task,
        agent=agent,
        outcome=outcome,
        tag=tag,
        since=since,
        until=until,
        min_reward=min_reward,
        max_reward=max_reward,
        min_version=min_version,
        max_version=max_version,
    )
    with opened(store) as reading:
        # One more than asked for tells whether there are more.
        rows = reading.rollouts(which, limit=limit + 1)
    shown = rows[:limit]
    if as_json:
        print_json([row_object(row) for row in shown])
        return
    console = Console()
    if not shown:
        console.print("no rollouts" + (" yet" if which.all else " match"))
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
    with opened(store) as reading:
        detail = reading.rollout(rollout)
    if as_json:
        print_json(detail_object(detail, tokens=tokens))
    else:
        console = Console(highlight=False)
        for part in tell(detail, tokens=tokens, full=full):
            console.print(part)
