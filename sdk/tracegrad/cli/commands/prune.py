"""`tracegrad prune`: old rollouts, or their texts, out of the store."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from humanize import naturalsize
from pydantic import ByteSize, TypeAdapter

from tracegrad.cli.commands.destructive import (
    RemovalOptions,
    RolloutOption,
    print_reclaimed,
    resolve_ids,
    with_progress,
)
from tracegrad.cli.options import parse_time, rollout_filter, with_options
from tracegrad.cli.store_option import USAGE_ERROR, StoreOption, fail, open_store, print_json
from tracegrad.store import RolloutFilter, Store
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
from tracegrad.text_format import format_count


@with_options(which=rollout_filter, how=RemovalOptions)
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
    *,
    which: RolloutFilter,
    how: RemovalOptions,
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
            _prune_text(writing, rule, how)
        else:
            whole = RetentionRule(
                selection=RolloutSelection(wanted=which, rollouts=ids, before=before),
                max_bytes=most,
                also_untrained=also_untrained,
            )
            _prune(writing, whole, how)


def _prune(store: Store, rule: RetentionRule, how: RemovalOptions) -> None:
    found = preview_prune(store, rule)
    if not how.as_json:
        _print_preview(found)
    if how.dry_run:
        if how.as_json:
            print_json({"would_remove": found.removed, "kept_untrained": found.kept})
        return
    if found.removed["rollouts"]:
        how.confirm(f"Remove {format_count(found.removed['rollouts'], 'rollout')} for good?")
    removed = with_progress(lambda report: prune(store, rule, progress=report))
    room = how.reclaim_space(store, changed=bool(removed["rollouts"]))
    if how.as_json:
        print_json({"removed": removed, "kept_untrained": found.kept, "files": room})
        return
    typer.echo(
        f"removed {format_count(removed['rollouts'], 'rollout')}, "
        f"{format_count(removed['turns'], 'turn')}"
    )
    print_reclaimed(room)


def _prune_text(store: Store, rule: TextRemovalRule, how: RemovalOptions) -> None:
    found = preview_drop_text(store, rule)
    what = f"the text of {format_count(found['turns'], 'turn')} ({naturalsize(found['bytes'])})"
    if how.dry_run:
        if how.as_json:
            print_json({"would_remove": found})
        else:
            typer.echo(f"would drop {what}; tokens, log-probabilities and rewards stay")
        return
    if found["turns"]:
        how.confirm(f"Drop {what} for good?")
    removed = with_progress(lambda report: drop_text(store, rule, progress=report))
    room = how.reclaim_space(store, changed=bool(removed["turns"] or removed["spans"]))
    if how.as_json:
        print_json({"removed": removed, "files": room})
        return
    typer.echo(
        f"dropped the text of {format_count(removed['turns'], 'turn')} and "
        f"{format_count(removed['spans'], 'span')}; "
        "tokens, log-probabilities and rewards are as before"
    )
    print_reclaimed(room)


# ByteSize reads a beginning: to it 1,5GB is one byte.
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]i?)?B?\s*", re.IGNORECASE)


def _parse_size(text: str) -> int:
    found = _SIZE.fullmatch(text)
    if found is None:
        raise typer.BadParameter(
            f"{text!r}; write bytes, or a size like 500MB, 20GB or 20GiB", param_hint="--max-size"
        )
    return TypeAdapter(ByteSize).validate_python(f"{found[1]}{found[2] or ''}B")


def _print_preview(found: PrunePreview) -> None:
    removed = found.removed
    typer.echo(
        f"the store takes {naturalsize(found.used_bytes)}; "
        f"{format_count(removed['rollouts'], 'rollout')} may go: "
        f"{format_count(removed['turns'], 'turn')}, about {naturalsize(removed['bytes'])}"
    )
    for state, number in sorted(removed.get("by_state", {}).items(), key=lambda each: -each[1]):
        typer.echo(f"  {number:>9,}  {state}")
    if found.kept:
        waiting = ", ".join(f"{number:,} {state}" for state, number in sorted(found.kept.items()))
        typer.echo(f"training is not done with, so these stay: {waiting} (--also-untrained)")
    if leased := removed.get("by_state", {}).get("leased"):
        typer.echo(f"{leased:,} are being trained on: the step of their trainer will be refused")
