"""`tracegrad redact`: texts taken out of what is stored already."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from tracegrad.cli.commands.destructive import (
    PARTLY_DONE,
    RemovalOptions,
    RolloutOption,
    print_reclaimed,
    resolve_ids,
    with_progress,
)
from tracegrad.cli.options import rollout_filter, with_options
from tracegrad.cli.store_option import USAGE_ERROR, StoreOption, fail, open_store, print_json
from tracegrad.events import Event, Json
from tracegrad.jsonutil import dump_json
from tracegrad.proxy.capture.redaction import (
    REDACTED,
    Hook,
    HookError,
    load_hooks,
    texts_of,
    with_texts,
)
from tracegrad.store import RolloutFilter, Store
from tracegrad.store.maintenance import (
    REDACTABLE_FIELDS,
    RedactionResult,
    RedactionRule,
    RolloutSelection,
    redact,
)
from tracegrad.store.maintenance.selection import EVERYTHING
from tracegrad.text_format import format_count

_SECRETS = "tracegrad.proxy.capture.redaction:secrets"


@with_options(which=rollout_filter, how=RemovalOptions)
def redact_command(
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="PATTERN", help="A regular expression (Python's), or - to read it from stdin."
        ),
    ] = None,
    store: StoreOption = None,
    literal: Annotated[bool, typer.Option("--literal", help="PATTERN is the text itself.")] = False,
    secrets: Annotated[
        bool, typer.Option("--secrets", help="API keys, tokens, private keys of known forms.")
    ] = False,
    hook: Annotated[
        list[str] | None,
        typer.Option("--hook", metavar="MODULE:FUNCTION", help="As for tracegrad proxy --redact."),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option("--field", help=f"Only in: {', '.join(REDACTABLE_FIELDS)}; may be repeated."),
    ] = None,
    drop_tokens: Annotated[
        bool,
        typer.Option(
            "--drop-tokens", help="Drop the tokens of turns whose text changes; see above."
        ),
    ] = False,
    rollout: RolloutOption = None,
    *,
    which: RolloutFilter,
    how: RemovalOptions,
) -> None:
    """Take texts out of the store: each match becomes [redacted].

    Token ids are not changed: whoever has the tokenizer can turn them back into text. With
    --drop-tokens the turns whose text changes lose their tokens, and all turns that continue
    them; these can never be trained. Decide at once: a second run finds no match any more.

    What agents send from now on is not cleaned: that is tracegrad proxy --redact.
    """
    fields = _fields(field)
    hooks, name = _hooks(pattern, literal=literal, secrets=secrets, names=hook or [])
    with open_store(store) as writing:
        rule = RedactionRule(
            selection=RolloutSelection(wanted=which, rollouts=resolve_ids(writing, rollout or ())),
            clean=make_cleaner(hooks),
            name=name,
            fields=fields,
            drop_tokens=drop_tokens,
        )
        try:
            _redact(writing, rule, how)
        except HookFailed as error:
            fail(f"redact: {error}; what was redacted before it stays so", PARTLY_DONE)


def _redact(store: Store, rule: RedactionRule, how: RemovalOptions) -> None:
    if not how.dry_run:
        tokens = " and drop tokens" if rule.drop_tokens else ""
        where = "the whole store" if rule.selection == EVERYTHING else "the chosen rollouts"
        how.confirm(f"Redact texts{tokens} in {where} for good?")
    found = with_progress(lambda report: redact(store, rule, dry_run=how.dry_run, progress=report))
    # What was replaced stays readable in free pages until these are rewritten.
    changed = not how.dry_run and any(found.removed.values())
    room = how.reclaim_space(store, changed=changed, whole=True)
    if how.as_json:
        print_json(
            {
                "would_redact" if how.dry_run else "redacted": found.removed,
                "unreadable": found.unreadable,
                "files": room,
            }
        )
    else:
        _print_result(found, rule, dry_run=how.dry_run)
        print_reclaimed(room)
    if found.unreadable:
        raise typer.Exit(PARTLY_DONE)


def _print_result(found: RedactionResult, rule: RedactionRule, *, dry_run: bool) -> None:
    counts = found.removed
    parts = [
        format_count(counts[name], word)
        for name, word in (
            ("turns", "turn"),
            ("spans", "span"),
            ("tasks", "task"),
            ("errors", "error"),
        )
        if counts[name]
    ]
    what = ", ".join(parts) or "nothing"
    rollouts = format_count(counts["rollouts"], "rollout")
    typer.echo(f"{'would redact' if dry_run else 'redacted'} {what} in {rollouts}")
    if counts["turns"]:
        if rule.drop_tokens:
            dropped = format_count(counts.get("tokens_dropped", 0), "turn")
            would = "would lose" if dry_run else "lost"
            typer.echo(f"{dropped} {would} the tokens and can never be trained (redacted)")
        else:
            typer.echo(
                "Their token ids are as they were: whoever has the tokenizer can turn them back "
                "into text. --drop-tokens, in the same run, drops them."
            )
    for rollout_id, why in found.unreadable.items():
        typer.echo(f"rollout {rollout_id} stayed as it was: {why}", err=True)
    if not dry_run and any(counts.values()):
        typer.echo("Copies elsewhere (backups, replicas, exports, logs) are not reached from here.")


def _fields(names: list[str] | None) -> frozenset[str]:
    if unknown := set(names or ()) - set(REDACTABLE_FIELDS):
        raise typer.BadParameter(
            f"{min(unknown)!r}; use {', '.join(REDACTABLE_FIELDS)}", param_hint="--field"
        )
    return frozenset(names or REDACTABLE_FIELDS)


def _hooks(
    pattern: str | None, *, literal: bool, secrets: bool, names: list[str]
) -> tuple[list[Hook], str]:
    """What is to be applied, and what it is called without saying what it looks for."""
    hooks: list[Hook] = []
    if pattern is not None:
        text = sys.stdin.read().rstrip("\n") if pattern == "-" else pattern
        try:
            hooks.append(pattern_hook(text, literal=literal))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="PATTERN") from None
    sys.path.append(".")  # the command itself does not look there, unlike `python -m`
    try:
        hooks += load_hooks([*([_SECRETS] if secrets else []), *names])
    except HookError as error:
        fail(f"redact: {str(error).replace('redact', '--hook')}", USAGE_ERROR)
    if not hooks:
        fail("redact: say what: PATTERN, --secrets or --hook MODULE:FUNCTION", USAGE_ERROR)
    return hooks, ", ".join(hook.name for hook in hooks)


class HookFailed(Exception):
    """A hook failed on a stored text. At capture such an event loses all its texts; what is stored
    already is worth more care."""


def make_cleaner(hooks: Sequence[Hook]) -> Callable[[Event], Event]:
    """An event as it may stay. Raises HookFailed."""

    def clean(event: Event) -> Event:
        texts = texts_of(event)
        if texts is None:
            return event
        record: Json | None = copy.deepcopy(texts)
        for hook in hooks:
            try:
                record = hook.function(record) if record is not None else None
                cleaned = with_texts(event, record or {})
                dump_json(record)
            except Exception as error:
                # Without its own words, which may be what is to be taken out.
                raise HookFailed(
                    f"{hook.name} failed on a {texts['type']} ({type(error).__name__})"
                ) from error
        return cleaned

    return clean


def pattern_hook(text: str, *, literal: bool) -> Hook:
    """ValueError: it is no pattern, or one that is everywhere."""
    if not text:
        raise ValueError("it is empty")
    try:
        pattern = re.compile(re.escape(text) if literal else text)
    except re.error as error:
        raise ValueError(f"it is no regular expression: {error}") from None
    if pattern.search("") is not None:
        raise ValueError("it matches an empty text: it would be found everywhere")

    def cleaned(value: Any) -> Any:
        if isinstance(value, str):
            # What a run before this one put there is no text: a second run changes nothing.
            return REDACTED.join(pattern.sub(_taken_out, part) for part in value.split(REDACTED))
        if isinstance(value, dict):
            return {cleaned(key): cleaned(item) for key, item in value.items()}
        if isinstance(value, list):
            return [cleaned(item) for item in value]
        return value

    def function(record: Json) -> Json:
        # What kind of record it is belongs to us.
        return {key: item if key == "type" else cleaned(item) for key, item in record.items()}

    return Hook("a literal text" if literal else "a pattern", function)


def _taken_out(match: re.Match[str]) -> str:
    return REDACTED if match[0] else ""
