"""`tracegrad prune`: old rollouts, or their texts, out of the store."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from tracegrad.cli.commands.destructive import (
    NOT_ASKED_WELL,
    DryRunOption,
    RolloutOption,
    VacuumOption,
    YesOption,
    ask,
    end_progress,
    progress,
    reclaimed,
    size_text,
    tell_room,
    whole_ids,
)
from tracegrad.cli.options import filtered, moment
from tracegrad.cli.render.format import count
from tracegrad.cli.store_option import JsonOption, StoreOption, fail, opened, print_json
from tracegrad.store import ALL, RolloutFilter, Store
from tracegrad.store.maintenance import (
    Preview,
    Retention,
    Selection,
    TextRule,
    drop_text,
    preview,
    preview_text,
    prune,
)

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}


@filtered
def prune_command(
    store: StoreOption = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN", help="Rollouts in which nothing has happened since: 30d, 2026-11-20."
        ),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The oldest, until the store takes no more: 20GB."),
    ] = None,
    text_only: Annotated[
        bool,
        typer.Option("--text-only", help="Only requests, responses and texts of spans; see above."),
    ] = False,
    also_untrained: Annotated[
        bool,
        typer.Option(
            "--also-untrained", help="Also what waits to be trained, is leased, or is open."
        ),
    ] = False,
    rollout: RolloutOption = None,
    which: RolloutFilter = ALL,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    vacuum: VacuumOption = True,
    as_json: JsonOption = False,
) -> None:
    """Remove old rollouts, or with --text-only their texts alone.

    Rollouts that training is not done with stay, unless --also-untrained is given. With
    --text-only tokens, log-probabilities and rewards stay, so that everything can be trained as
    before; --older-than is then about the turns themselves.

    Steps and policy versions stay, and what was removed stays counted. Proxies and trainers may
    go on meanwhile.
    """
    before = moment(older_than, "--older-than")
    most = _bytes(max_size) if max_size is not None else None
    if before is None and most is None and which.all and not rollout:
        fail(
            "prune: say what may go: --older-than 30d, --max-size 20GB, --rollout ID or a filter",
            NOT_ASKED_WELL,
        )
    if text_only and (most is not None or also_untrained):
        name = "--also-untrained" if also_untrained else "--max-size"
        fail(f"prune: {name} is about whole rollouts: leave it or --text-only out", NOT_ASKED_WELL)
    with opened(store) as writing:
        ids = whole_ids(writing, rollout or ())
        if text_only:
            rule = TextRule(
                selection=Selection(wanted=which, rollouts=ids),
                before=before if before is not None else float("inf"),
            )
            _prune_text(writing, rule, dry_run=dry_run, yes=yes, vacuum=vacuum, as_json=as_json)
        else:
            whole = Retention(
                selection=Selection(wanted=which, rollouts=ids, before=before),
                max_bytes=most,
                also_untrained=also_untrained,
            )
            _prune(writing, whole, dry_run=dry_run, yes=yes, vacuum=vacuum, as_json=as_json)


def _prune(
    store: Store, rule: Retention, *, dry_run: bool, yes: bool, vacuum: bool, as_json: bool
) -> None:
    found = preview(store, rule)
    if not as_json:
        _tell_preview(found, rule)
    if dry_run:
        if as_json:
            print_json({"would_remove": found.removed, "kept_untrained": found.kept})
        return
    if found.removed["rollouts"]:
        ask(f"Remove {count(found.removed['rollouts'], 'rollout')} for good?", yes)
    removed = prune(store, rule, progress=progress("rollouts"))
    end_progress()
    room = reclaimed(store, vacuum=vacuum and bool(removed["rollouts"]))
    if as_json:
        print_json({"removed": removed, "kept_untrained": found.kept, "files": room})
        return
    typer.echo(
        f"removed {count(removed['rollouts'], 'rollout')}, {count(removed['turns'], 'turn')}"
    )
    tell_room(room)


def _prune_text(
    store: Store, rule: TextRule, *, dry_run: bool, yes: bool, vacuum: bool, as_json: bool
) -> None:
    found = preview_text(store, rule)
    what = f"the text of {count(found['turns'], 'turn')} ({size_text(found['bytes'])})"
    if dry_run:
        if as_json:
            print_json({"would_remove": found})
        else:
            typer.echo(f"would drop {what}; tokens, log-probabilities and rewards stay")
        return
    if found["turns"]:
        ask(f"Drop {what} for good?", yes)
    removed = drop_text(store, rule, progress=progress("rollouts"))
    end_progress()
    room = reclaimed(store, vacuum=vacuum and bool(removed["turns"] or removed["spans"]))
    if as_json:
        print_json({"removed": removed, "files": room})
        return
    typer.echo(
        f"dropped the text of {count(removed['turns'], 'turn')} and "
        f"{count(removed['spans'], 'span')}; tokens, log-probabilities and rewards are as before"
    )
    tell_room(room)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    if found is None:
        raise typer.BadParameter(
            f"{text!r}; write bytes, or a size like 500MB, 20GB or 20GiB", param_hint="--max-size"
        )
    return round(float(found[1]) * (_UNITS | _BINARY_UNITS)[found[2] or ""])


def _tell_preview(found: Preview, rule: Retention) -> None:
    removed = found.removed
    typer.echo(
        f"the store takes {size_text(found.used_bytes)}; "
        f"{count(removed['rollouts'], 'rollout')} may go: {count(removed['turns'], 'turn')}, "
        f"about {size_text(removed['bytes'])}"
    )
    for state, number in sorted(removed.get("by_state", {}).items(), key=lambda each: -each[1]):
        typer.echo(f"  {number:>9,}  {state}")
    if found.kept:
        waiting = ", ".join(f"{number:,} {state}" for state, number in sorted(found.kept.items()))
        typer.echo(f"training is not done with, so these stay: {waiting} (--also-untrained)")
    if leased := removed.get("by_state", {}).get("leased"):
        typer.echo(f"{leased:,} are being trained on: the step of their trainer will be refused")
