"""`tracegrad score`: a reward from the command line, to a running proxy."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer

from tracegrad.cli.store_option import USAGE_ERROR, JsonOption, fail, print_json
from tracegrad.feedback_client import Feedback, feedback
from tracegrad.transport import ProxyRefused, ProxyUnreachable

NO_PROXY = 3
# A person waits longer than an application may: a busy proxy's store takes its time.
PATIENCE_S = 60.0
_LATE = {
    "trained": "training had taken its rewards: it is kept, and changes no step",
    "skipped": "training had skipped the rollout: it is kept, and changes nothing",
    "leased": "training is at the rollout now, with the rewards of before",
}


def score_command(
    target: Annotated[
        str, typer.Argument(metavar="ID", help="A rollout's id; with --response a response's.")
    ],
    value: Annotated[
        str, typer.Argument(metavar="VALUE", help="A number, up (1), down (0), or withdraw.")
    ],
    response: Annotated[
        bool,
        typer.Option("--response", help="ID is a response's, as its client got it."),
    ] = False,
    turn: Annotated[
        int | None,
        typer.Option(help="Of a rollout: counted from 0, or from the end where negative."),
    ] = None,
    of_turn: Annotated[
        bool, typer.Option("--of-turn", help="Of a response: its turn, not its whole rollout.")
    ] = False,
    name: Annotated[str, typer.Option(help="Training uses the one named reward.")] = "reward",
    why: Annotated[str | None, typer.Option(help="For people to read.")] = None,
    url: Annotated[
        str | None, typer.Option(help="The proxy's address; else $TRACEGRAD_URL.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Give a rollout, or one of its turns, a reward, at any time.

    Of several of one name the last one counts. "withdraw" takes back what was given: the reward is
    unknown again, which is not 0. A negative VALUE goes behind --, as in: tracegrad score ID -- -1.
    """
    scope: Literal["rollout", "turn"] = "turn" if of_turn else "rollout"
    which: dict[str, Any] = {"response_id" if response else "rollout_id": target}
    try:
        given = feedback(
            _value(value),
            **which,
            turn=turn,
            scope=scope,
            name=name,
            comment=why,
            url=url,
            timeout_s=PATIENCE_S,
        )
    except (ProxyRefused, ValueError) as error:
        fail(str(error), USAGE_ERROR)
    except ProxyUnreachable as error:
        at = "TRACEGRAD_URL" if url is None else f"--url {url}"
        fail(f"the proxy did not take it: {error}; is {at} right?", NO_PROXY)
    if as_json:
        print_json(asdict(given))
    else:
        typer.echo(_said(given, taken_back=value == "withdraw"))


def _value(text: str) -> float | Literal["up", "down"] | None:
    if text == "up":
        return "up"
    if text == "down":
        return "down"
    if text == "withdraw":
        return None
    try:
        return float(text)
    except ValueError:
        fail(f"VALUE: {text!r} is no number; give one, up, down or withdraw", USAGE_ERROR)


def _said(given: Feedback, *, taken_back: bool) -> str:
    which = f"rollout {given.rollout_id}"
    if given.turn is not None:
        which = f"turn {given.turn} of {which}"
    line = f"{which}: {'taken back' if taken_back else 'stored'}"
    if given.unknown_rollout:
        line += "; nobody opened it and no call belongs to it so far: is the id right?"
    if given.after_training is not None:
        line += f"; {_LATE[given.after_training]}"
    return line
