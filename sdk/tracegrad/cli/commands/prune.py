"""`tracegrad prune`: old rollouts, or their texts, out of the store."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from tracegrad.cli.commands.destructive import (
    USAGE_ERROR,
    DryRunOption,
    RolloutOption,
    VacuumOption,
    YesOption,
    confirm,
    end_progress,
    format_size,
    make_progress,
    print_reclaimed,
    reclaim_space,
    resolve_ids,
)
from tracegrad.cli.options import parse_time, with_rollout_filter
from tracegrad.cli.render.format import plural
from tracegrad.cli.store_option import JsonOption, StoreOption, fail, open_store, print_json
from tracegrad.store import ALL, RolloutFilter, Store
from tracegrad.store.maintenance import (
    PrunePreview,
    RetentionRule,
    RolloutSelection,
    TextRemovalRule,
    drop_text,
    preview_drop_text,
    preview_prune,
    prune,
)

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}


@with_rollout_filter
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
    before = parse_time(older_than, "--older-than")
    most = _parse_size(max_size) if max_size is not None else None
    if before is None and most is None and which.matches_all and not rollout:
        fail(
            "prune: say what may go: --older-than 30d, --max-size 20GB, --rollout ID or a filter",
            USAGE_ERROR,
        )
    if text_only and (most is not None or also_untrained):
        name = "--also-untrained" if also_untrained else "--max-size"
        fail(f"prune: {name} is about whole rollouts: leave it or --text-only out", USAGE_ERROR)
    with open_store(store) as writing:
        ids = resolve_ids(writing, rollout or ())
        if text_only:
            rule = TextRemovalRule(
                selection=RolloutSelection(wanted=which, rollouts=ids),
                before=before if before is not None else float("inf"),
            )
            _prune_text(writing, rule, dry_run=dry_run, yes=yes, vacuum=vacuum, as_json=as_json)
        else:
            whole = RetentionRule(
                selection=RolloutSelection(wanted=which, rollouts=ids, before=before),
                max_bytes=most,
                also_untrained=also_untrained,
            )
            _prune(writing, whole, dry_run=dry_run, yes=yes, vacuum=vacuum, as_json=as_json)


def _prune(
    store: Store, rule: RetentionRule, *, dry_run: bool, yes: bool, vacuum: bool, as_json: bool
) -> None:
    found = preview_prune(store, rule)
    if not as_json:
        _print_preview(found, rule)
    if dry_run:
        if as_json:
            print_json({"would_remove": found.removed, "kept_untrained": found.kept})
        return
    if found.removed["rollouts"]:
        confirm(f"Remove {plural(found.removed['rollouts'], 'rollout')} for good?", yes)
    removed = prune(store, rule, progress=make_progress("rollouts"))
    end_progress()
    room = reclaim_space(store, vacuum=vacuum and bool(removed["rollouts"]))
    if as_json:
        print_json({"removed": removed, "kept_untrained": found.kept, "files": room})
        return
    typer.echo(
        f"removed {plural(removed['rollouts'], 'rollout')}, {plural(removed['turns'], 'turn')}"
    )
    print_reclaimed(room)


def _prune_text(
    store: Store, rule: TextRemovalRule, *, dry_run: bool, yes: bool, vacuum: bool, as_json: bool
) -> None:
    found = preview_drop_text(store, rule)
    what = f"the text of {plural(found['turns'], 'turn')} ({format_size(found['bytes'])})"
    if dry_run:
        if as_json:
            print_json({"would_remove": found})
        else:
            typer.echo(f"would drop {what}; tokens, log-probabilities and rewards stay")
        return
    if found["turns"]:
        confirm(f"Drop {what} for good?", yes)
    removed = drop_text(store, rule, progress=make_progress("rollouts"))
    end_progress()
    room = reclaim_space(store, vacuum=vacuum and bool(removed["turns"] or removed["spans"]))
    if as_json:
        print_json({"removed": removed, "files": room})
        return
    typer.echo(
        f"dropped the text of {plural(removed['turns'], 'turn')} and "
        f"{plural(removed['spans'], 'span')}; tokens, log-probabilities and rewards are as before"
    )
    print_reclaimed(room)


def _parse_size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    if found is None:
        raise typer.BadParameter(
            f"{text!r}; write bytes, or a size like 500MB, 20GB or 20GiB", param_hint="--max-size"
        )
    return round(float(found[1]) * (_UNITS | _BINARY_UNITS)[found[2] or ""])


def _print_preview(found: PrunePreview, rule: RetentionRule) -> None:
    removed = found.removed
    typer.echo(
        f"the store takes {format_size(found.used_bytes)}; "
        f"{plural(removed['rollouts'], 'rollout')} may go: {plural(removed['turns'], 'turn')}, "
        f"about {format_size(removed['bytes'])}"
    )
    for state, number in sorted(removed.get("by_state", {}).items(), key=lambda each: -each[1]):
        typer.echo(f"  {number:>9,}  {state}")
    if found.kept:
        waiting = ", ".join(f"{number:,} {state}" for state, number in sorted(found.kept.items()))
        typer.echo(f"training is not done with, so these stay: {waiting} (--also-untrained)")
    if leased := removed.get("by_state", {}).get("leased"):
        typer.echo(f"{leased:,} are being trained on: the step of their trainer will be refused")
