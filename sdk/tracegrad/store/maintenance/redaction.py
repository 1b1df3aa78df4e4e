"""Stored texts cleaned afterwards, as a proxy cleans them before they are stored.

A turn's tokens are what a model is trained on, and stay as they are: whoever has the tokenizer
turns them back into text. With `drop_tokens` the turns whose texts change lose theirs, and all
that continue these: their prompts begin with those tokens. What is left of such a turn's prompt is
the context of the last turn above it that keeps its own. They can never be trained (`redacted`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from sqlalchemy import Connection, delete, insert, select, update

from tracegrad.events import (
    Event,
    Json,
    Outcome,
    RolloutFinished,
    RolloutStarted,
    Turn,
    logprob_array,
    token_id_array,
)
from tracegrad.store.copy.export_records import iter_spans_without_rollout
from tracegrad.store.encoding.blobs import ContextDigest
from tracegrad.store.encoding.shared_texts import TextSightings
from tracegrad.store.errors import StoreCorrupt
from tracegrad.store.maintenance.removal_log import REDACTION, add_counts, record_removal
from tracegrad.store.maintenance.rewrite_texts import (
    EditableTexts,
    RewrittenTurn,
    TextEdit,
    Values,
    rewritten_spans,
    rewritten_turns,
    write_rewritten,
    write_spans,
)
from tracegrad.store.maintenance.selection import RolloutSelection, pages
from tracegrad.store.models import Outcomes, Rollouts, RolloutTags, Turns
from tracegrad.store.read.rollouts import load_spans, load_tags
from tracegrad.store.retry import retry_on_conflict
from tracegrad.store.store import Store
from tracegrad.store.write.events import tag_rows

# `Turn.untrainable` of a turn whose tokens were dropped.
TOKENS_REDACTED = "redacted"
REDACTABLE_FIELDS = ("request", "response", "span", "task", "error")

_AT_ONCE = 100
_NO_TOKENS: Values = {
    "completion_tokens": 0,
    "delta": b"",
    "completion": b"",
    "logprobs": b"",
    "routed_experts": None,  # of tokens that are gone
    "state_key": None,
    "observation": None,  # of a text that is gone with them
    "policy_versions": [],
    "last_version": None,
    "untrainable": TOKENS_REDACTED,
}

# The event as it may be stored. What it raises ends the redaction.
Clean = Callable[[Event], Event]
Progress = Callable[[Json], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RedactionRule:
    """`name` says what is taken out without saying it: it is stored."""

    selection: RolloutSelection
    clean: Clean
    name: str
    fields: frozenset[str] = frozenset(REDACTABLE_FIELDS)
    drop_tokens: bool = False

    def describe(self) -> Json:
        tokens = {"drop_tokens": True} if self.drop_tokens else {}
        return (
            {"redact": self.name, "fields": sorted(self.fields)}
            | tokens
            | self.selection.describe()
        )


class RedactionResult(NamedTuple):
    """`removed` as `removals` has it; `unreadable` says of each rollout why it stayed as it is."""

    removed: Json
    unreadable: dict[str, str]


def redact(
    store: Store, rule: RedactionRule, *, dry_run: bool = False, progress: Progress = lambda _: None
) -> RedactionResult:
    """Clean what the rule selects, one rollout a transaction. Doing it again changes nothing.

    `dry_run` only counts. What `rule.clean` raises goes on; what was done before stays done.
    """
    total: Json = {"rollouts": 0, "turns": 0, "spans": 0, "tasks": 0, "errors": 0}
    repeats = TextSightings()
    unreadable: dict[str, str] = {}
    for rollout_id in chain.from_iterable(pages(store, rule.selection.where(), _AT_ONCE)):
        try:
            with store.reading() as connection:
                found = _changes(connection, rollout_id, rule, repeats).counts()
            if found and not dry_run:
                apply = partial(_apply, store, rollout_id, rule, repeats)
                # Writers of several rollouts lock them in their own order: PostgreSQL ends the
                # rings that come of it, and may choose us.
                found = retry_on_conflict(apply)
        except StoreCorrupt as error:
            unreadable[rollout_id] = str(error)
            continue
        total = add_counts(total, found)
        progress(total)
    if "span" in rule.fields and rule.selection.matches_all:
        total = add_counts(total, _redact_spans_without_rollout(store, rule, dry_run=dry_run))
    return RedactionResult(total, unreadable)


@dataclass(slots=True)
class _Changes:
    """What of one rollout becomes another. None: it stays."""

    turns: list[RewrittenTurn]
    changed: int  # turns whose own texts are others
    rewritten: int  # turns that were deltas to one of these
    dropped: int  # turns that lose their tokens
    spans: list[Values]
    opened: RolloutStarted | None
    errors: dict[int, str | None]  # of outcomes, by number
    error: tuple[str | None] | None

    def counts(self) -> Json:
        tasks = int(self.opened is not None)
        errors = len(self.errors) or int(self.error is not None)
        if not (self.turns or self.spans or tasks or errors):
            return {}
        return {
            "rollouts": 1,
            "turns": self.changed,
            "retold": self.rewritten,
            "tokens_dropped": self.dropped,
            "spans": len(self.spans),
            "tasks": tasks,
            "errors": errors,
        }


def _changes(
    connection: Connection, rollout_id: str, rule: RedactionRule, repeats: TextSightings
) -> _Changes:
    turns: list[RewrittenTurn] = []
    if {"request", "response"} & rule.fields:
        turns = [*rewritten_turns(connection, rollout_id, _change(rule), repeats)]
    own = {one.turn_id for one in turns if one.changed}
    dropped = _without_tokens(connection, rollout_id, own) if own and rule.drop_tokens else []
    errors, error = _errors(connection, rollout_id, rule)
    return _Changes(
        turns=[*turns, *dropped],
        changed=len(own),
        rewritten=len(turns) - len(own),
        dropped=len(dropped),
        spans=_spans(connection, rollout_id, rule),
        opened=_opened(connection, rollout_id, rule),
        errors=errors,
        error=error,
    )


def _apply(store: Store, rollout_id: str, rule: RedactionRule, repeats: TextSightings) -> Json:
    with store.exclusive() as connection:
        # Nobody adds to the rollout until the end; one at a time, so that nobody waits in a ring.
        here = Rollouts.rollout_id == rollout_id
        connection.execute(select(Rollouts.rollout_id).where(here).with_for_update())
        changes = _changes(connection, rollout_id, rule, repeats)
        counts = changes.counts()
        if not counts:
            return {}
        write_rewritten(connection, changes.turns)
        write_spans(connection, changes.spans)
        if changes.opened is not None:
            _write_opened(connection, changes.opened)
        if changes.error is not None:
            connection.execute(update(Rollouts).where(here).values(error=changes.error[0]))
        for seq, error in changes.errors.items():
            connection.execute(update(Outcomes).where(Outcomes.seq == seq).values(error=error))
        record_removal(connection, REDACTION, rule.describe(), counts)
    return counts


def _change(rule: RedactionRule) -> TextEdit:
    def change(texts: EditableTexts) -> EditableTexts:
        if texts.request is None and texts.response is None:
            return texts
        event = Turn(
            turn_id=texts.turn_id,
            rollout_id="",
            dialect="",
            model="",
            prompt_token_ids=token_id_array(),
            completion_token_ids=token_id_array(),
            completion_logprobs=logprob_array(),
            policy_versions=(),
            sampling=texts.sampling,
            request=texts.request,
            response=texts.response,
        )
        cleaned = rule.clean(event)
        assert isinstance(cleaned, Turn)
        if "request" in rule.fields:
            texts = replace(texts, request=cleaned.request, sampling=cleaned.sampling)
        if "response" in rule.fields:
            texts = replace(texts, response=cleaned.response)
        return texts

    return change


def _without_tokens(
    connection: Connection, rollout_id: str, dropped: set[str]
) -> list[RewrittenTurn]:
    """Of these turns and all that continue one of them: their rows without tokens of their own."""
    columns = (
        Turns.turn_id,
        Turns.parent_id,
        Turns.prompt_tokens + Turns.completion_tokens,
        Turns.context_digest,
    )
    query = select(*columns).where(Turns.rollout_id == rollout_id).order_by(Turns.seq)
    contexts: dict[str | None, tuple[int, bytes]] = {None: (0, ContextDigest().value())}
    without: dict[str, RewrittenTurn] = {}
    for turn_id, parent_id, length, digest in connection.execute(query):
        if turn_id in dropped or parent_id in without:
            length, digest = contexts[parent_id]
            row = {"prompt_tokens": length, "context_digest": digest, **_NO_TOKENS}
            without[turn_id] = RewrittenTurn(turn_id, parent_id, turn_id in dropped, row)
        contexts[turn_id] = (length, digest)
    return [*without.values()]


def _spans(connection: Connection, rollout_id: str, rule: RedactionRule) -> list[Values]:
    if "span" not in rule.fields:
        return []
    return rewritten_spans(load_spans(connection, [rollout_id])[rollout_id], rule.clean)


def _opened(connection: Connection, rollout_id: str, rule: RedactionRule) -> RolloutStarted | None:
    if "task" not in rule.fields:
        return None
    task = connection.scalar(select(Rollouts.task).where(Rollouts.rollout_id == rollout_id))
    tags = load_tags(connection, [rollout_id])[rollout_id]
    if task is None and not tags:
        return None
    event = RolloutStarted(rollout_id=rollout_id, task=task, tags=tags)
    cleaned = rule.clean(event)
    assert isinstance(cleaned, RolloutStarted)
    return cleaned if (cleaned.task, dict(cleaned.tags)) != (task, tags) else None


def _write_opened(connection: Connection, event: RolloutStarted) -> None:
    here = Rollouts.rollout_id == event.rollout_id
    connection.execute(update(Rollouts).where(here).values(task=event.task))
    connection.execute(delete(RolloutTags).where(RolloutTags.rollout_id == event.rollout_id))
    if rows := tag_rows(event):
        connection.execute(insert(RolloutTags), rows)


def _errors(
    connection: Connection, rollout_id: str, rule: RedactionRule
) -> tuple[dict[int, str | None], tuple[str | None] | None]:
    """Of every reported end, and of the one that counts."""
    if "error" not in rule.fields:
        return {}, None

    def cleaned(error: str) -> str | None:
        event = rule.clean(
            RolloutFinished(rollout_id=rollout_id, outcome=Outcome.AGENT_ERROR, error=error)
        )
        assert isinstance(event, RolloutFinished)
        return event.error

    ends = select(Outcomes.seq, Outcomes.error).where(
        Outcomes.rollout_id == rollout_id, Outcomes.error.is_not(None)
    )
    errors = {
        seq: new
        for seq, error in connection.execute(ends)
        if error is not None and (new := cleaned(error)) != error
    }
    query = select(Rollouts.error).where(Rollouts.rollout_id == rollout_id)
    counts = connection.scalar(query)
    if counts is None or (new := cleaned(counts)) == counts:
        return errors, None
    return errors, (new,)


def _redact_spans_without_rollout(store: Store, rule: RedactionRule, *, dry_run: bool) -> Json:
    """Spans of no rollout."""
    total: Json = {}
    for spans in iter_spans_without_rollout(store, _AT_ONCE):
        if rows := rewritten_spans(spans, rule.clean):
            counts = {"spans": len(rows)}
            if not dry_run:
                with store.exclusive() as connection:
                    write_spans(connection, rows)
                    record_removal(connection, REDACTION, rule.describe(), counts)
            total = add_counts(total, counts)
    return total
