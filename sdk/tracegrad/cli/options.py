"""Options that several commands share: the same words everywhere."""

from __future__ import annotations

import getpass
import inspect
import re
import socket
import time
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Annotated, Any

import typer

from tracegrad.events import Outcome
from tracegrad.store import OPEN, RolloutFilter
from tracegrad.store.filters import STATES
from tracegrad.version import VERSION

_AGO = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_WHEN = "a date (2026-11-20), a time (2026-11-20T14:00), seconds since 1970, or how long ago (7d)"


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
        str | None, typer.Option(metavar="WHEN", help=f"Opened then or later: {_WHEN}.")
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
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise typer.BadParameter(f"{pair!r}; write key=value", param_hint="--tag")
        found[key] = value
    return found


def parse_time(text: str | None, option: str) -> float | None:
    """Seconds since the epoch. Dates and times without a zone are local ones."""
    if text is None:
        return None
    if ago := re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text):
        return time.time() - float(ago[1]) * _AGO[ago[2]]
    if re.fullmatch(r"\d{9,}(\.\d+)?", text):
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r}; write {_WHEN}", param_hint=option) from None
