"""Options that several commands share: the same words everywhere."""

from __future__ import annotations

import getpass
import inspect
import socket
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from tracegrad.events import Outcome
from tracegrad.inspect.filter_text import WHEN, read_tags, read_time
from tracegrad.store import OPEN, RolloutFilter
from tracegrad.store.filters import STATES
from tracegrad.version import VERSION


def who_decides() -> str:
    """user@host"""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, in a container
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tracegrad {VERSION}")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
]


def with_options(
    **groups: Callable[..., Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For typer: a command with all options of `groups[name]` in place of its parameter `name`,
    whose value `groups[name]` makes of them."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = {
            name: inspect.signature(group, eval_str=True).parameters
            for name, group in groups.items()
        }
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, own in inspect.signature(command, eval_str=True).parameters.items()
            for parameter in (options[name].values() if name in options else [own])
        ]

        @wraps(command)
        def wrapped(**given: Any) -> None:
            values = {
                name: groups[name](**{each: given.pop(each) for each in options[name]})
                for name in groups
            }
            command(**given, **values)

        wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return wrapped

    return decorate


def rollout_filter(
    *,
    task: Annotated[
        str | None,
        typer.Option(
            help="Only of this task; of a hash that `rollouts ls` shows, its beginning is enough."
        ),
    ] = None,
    agent: Annotated[str | None, typer.Option(help="Only of this agent.")] = None,
    outcome: Annotated[
        str | None, typer.Option(help=f"Only with this outcome: {OPEN}, {', '.join(Outcome)}.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            help=f"Only those that stand so on their way to training: {', '.join(STATES)}."
        ),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="Only with this tag; may be repeated.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help=f"Opened then or later: {WHEN}.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Opened before that.")] = None,
    min_reward: Annotated[
        float | None, typer.Option(help="Only with at least this reward.")
    ] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only with at most this reward.")] = None,
    min_version: Annotated[
        int | None, typer.Option(help="Only sampled by this policy version or later.")
    ] = None,
    max_version: Annotated[
        int | None, typer.Option(help="Only sampled by this policy version or earlier.")
    ] = None,
    held_out_mark: Annotated[
        bool | None,
        typer.Option(
            "--eval/--no-eval", help="Only those that are held out by mark (run --eval), or not."
        ),
    ] = None,
) -> RolloutFilter:
    """Raises BadParameter that names the option."""
    try:
        return RolloutFilter(
            task=task,
            agent=agent,
            outcome=outcome,
            state=state,
            tags=parse_tags(tag or []),
            since=parse_time(since, "--since"),
            until=parse_time(until, "--until"),
            min_reward=min_reward,
            max_reward=max_reward,
            min_version=min_version,
            max_version=max_version,
            held_out=held_out_mark,
        )
    except ValueError as error:
        name, _, reason = str(error).partition(": ")
        raise typer.BadParameter(reason, param_hint=f"--{name.replace('_', '-')}") from None


with_rollout_filter = with_options(which=rollout_filter)


def parse_tags(pairs: list[str]) -> dict[str, str]:
    try:
        return read_tags(pairs)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--tag") from None


def parse_time(text: str | None, option: str) -> float | None:
    """Seconds since the epoch. Dates and times without a zone are local ones."""
    try:
        return None if text is None else read_time(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
