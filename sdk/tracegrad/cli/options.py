"""The options by which commands choose rollouts: the same words everywhere."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any

import typer

from tracegrad.events import Outcome
from tracegrad.store import OPEN, RolloutFilter
from tracegrad.store.filters import STATES

_AGO = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_WHEN = "a date (2026-11-20), a time (2026-11-20T14:00), seconds since 1970, or how long ago (7d)"

TaskOption = Annotated[str | None, typer.Option("--task", help="Only of this task.")]
AgentOption = Annotated[str | None, typer.Option("--agent", help="Only of this agent.")]
OutcomeOption = Annotated[
    str | None,
    typer.Option("--outcome", help=f"Only with this outcome: {OPEN}, {', '.join(Outcome)}."),
]
StateOption = Annotated[
    str | None,
    typer.Option(
        "--state", help=f"Only those that stand so on their way to training: {', '.join(STATES)}."
    ),
]
TagOption = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="K=V", help="Only with this tag; may be repeated."),
]
SinceOption = Annotated[
    str | None, typer.Option("--since", metavar="WHEN", help=f"Opened then or later: {_WHEN}.")
]
UntilOption = Annotated[
    str | None, typer.Option("--until", metavar="WHEN", help="Opened before that.")
]
MinRewardOption = Annotated[
    float | None, typer.Option("--min-reward", help="Only with at least this reward.")
]
MaxRewardOption = Annotated[
    float | None, typer.Option("--max-reward", help="Only with at most this reward.")
]
MinVersionOption = Annotated[
    int | None, typer.Option("--min-version", help="Only sampled by this policy version or later.")
]
MaxVersionOption = Annotated[
    int | None,
    typer.Option("--max-version", help="Only sampled by this policy version or earlier."),
]


def with_rollout_filter(command: Callable[..., None]) -> Callable[..., None]:
    """For typer: a command with the parameter `which`, as one with all options of `wanted` in
    its place."""
    options = inspect.signature(rollout_filter, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, each in own.items()
        for parameter in (options.values() if name == "which" else [each])
    ]

    def asked(**given: Any) -> None:
        which = rollout_filter(**{name: given.pop(name) for name in options})
        command(**given, which=which)

    asked.__doc__ = command.__doc__
    asked.__name__ = command.__name__
    asked.__annotations__ = {each.name: each.annotation for each in parameters}
    asked.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return asked


def rollout_filter(
    *,
    task: TaskOption = None,
    agent: AgentOption = None,
    outcome: OutcomeOption = None,
    state: StateOption = None,
    tag: TagOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    min_reward: MinRewardOption = None,
    max_reward: MaxRewardOption = None,
    min_version: MinVersionOption = None,
    max_version: MaxVersionOption = None,
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
        )
    except ValueError as error:
        name, _, reason = str(error).partition(": ")
        raise typer.BadParameter(reason, param_hint=f"--{name.replace('_', '-')}") from None


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
