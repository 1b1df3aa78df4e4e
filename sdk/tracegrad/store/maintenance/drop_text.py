"""Texts dropped while tokens stay: at capture, and of what is stored already."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, exists, func, or_, select, update

from tracegrad.events import Event, Json, Span, Turn
from tracegrad.store.encoding.shared_texts import TextSightings, remove_links, remove_unused
from tracegrad.store.maintenance.removal_log import TEXT, add_counts, record_removal
from tracegrad.store.maintenance.rewrite_texts import (
    EditableTexts,
    rewritten_spans,
    rewritten_turns,
    write_rewritten,
    write_spans,
)
from tracegrad.store.maintenance.selection import PageKey, RolloutSelection, lock_next_page
from tracegrad.store.maintenance.sizes import text_bytes
from tracegrad.store.models import Rollouts, Spans, Turns, TurnTexts
from tracegrad.store.rows import load, select_fields
from tracegrad.store.store import Store

# Rollouts of one transaction, and seconds after which it takes no more: proxies wait for it.
AT_ONCE, _LONG = 100, 0.2
# What is left of a text: that there was one.
DROPPED = "[dropped]"
# Attributes whose last word is one of these name what a span is, and hold no text of it.
_KEPT_ATTRIBUTES = frozenset(
    {"id", "kind", "model", "name", "operation", "provider", "reason", "role", "system", "type"}
    | {"rollout", "span_kind", "request_model", "response_model", "model_name", "finish_reasons"}
)

Progress = Callable[[Json], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRemovalRule:
    """Of the selected rollouts, the turns and spans from before that time."""

    selection: RolloutSelection
    before: float = float("inf")

    def describe(self) -> Json:
        more = {} if self.before == float("inf") else {"text_before": self.before}
        return self.selection.describe() | more

    def turns(self) -> ColumnElement[bool]:
        """Of `Turns`: those that have text which goes."""
        has_text = or_(Turns.request.is_not(None), Turns.response.is_not(None))
        return and_(has_text, *([Turns.created_at < self.before] if self._bounded else []))

    def spans(self) -> ColumnElement[bool]:
        """Of `Spans`: those whose texts go."""
        known = Spans.rollout_id.is_not(None)
        return and_(known, *([Spans.start_ns < round(self.before * 1e9)] if self._bounded else []))

    @property
    def _bounded(self) -> bool:
        return self.before != float("inf")


def without_texts_of_event(event: Event) -> Event:
    """What the store keeps of an event where raw text is switched off."""
    match event:
        case Turn():
            return replace(event, request=None, response=None)
        case Span():
            return replace(event, attributes=without_attribute_texts(event.attributes))
    return event


def without_attribute_texts(attributes: Json) -> Json:
    """A span's attributes; numbers and names stay, of each text only that it was there."""
    return {key: _kept(key, value) for key, value in attributes.items()}


def _kept(key: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    return value if key.rpartition(".")[2] in _KEPT_ATTRIBUTES else DROPPED


def preview_drop_text(store: Store, rule: TextRemovalRule) -> Json:
    """What `drop_text` would remove of turns."""
    query = (
        select(func.count(), func.coalesce(func.sum(text_bytes()), 0))
        .select_from(Turns)
        .join(Rollouts, Rollouts.rollout_id == Turns.rollout_id)
        .where(rule.selection.where(), rule.turns())
    )
    with store.reading() as connection:
        turns, size = connection.execute(query).one()
    return {"turns": int(turns), "bytes": int(size)}


def drop_text(
    store: Store,
    rule: TextRemovalRule,
    *,
    progress: Progress = lambda _: None,
    at_once: int = AT_ONCE,
) -> Json:
    """Drop requests, responses and the texts of spans. Returns the counts, as in `removals`.

    Requests that stay but are deltas to dropped ones are encoded again. Raises StoreCorrupt where
    such a one cannot be read; what was done before stays done.
    """
    total: Json = {"rollouts": 0, "turns": 0, "spans": 0, "bytes": 0}
    after: PageKey | None = None
    repeats = TextSightings()
    where = and_(rule.selection.where(), or_(_any_turn(rule), _any_span(rule)))
    while True:
        with store.exclusive() as connection:
            keys = lock_next_page(connection, where, after, at_once)
            if not keys:
                return total
            removed: Json = {}
            until = time.monotonic() + _LONG
            for after in keys:
                removed = add_counts(removed, _drop(connection, after.rollout_id, rule, repeats))
                if time.monotonic() > until:
                    break
            if removed.get("rollouts"):
                record_removal(connection, TEXT, rule.describe(), removed)
        total = add_counts(total, removed)
        progress(total)


def _any_turn(rule: TextRemovalRule) -> ColumnElement[bool]:
    return exists().where(Turns.rollout_id == Rollouts.rollout_id, rule.turns())


def _any_span(rule: TextRemovalRule) -> ColumnElement[bool]:
    return exists().where(Spans.rollout_id == Rollouts.rollout_id, rule.spans())


def _drop(
    connection: Connection, rollout_id: str, rule: TextRemovalRule, repeats: TextSightings
) -> Json:
    here = and_(Turns.rollout_id == rollout_id, rule.turns())
    query = select(func.count(), func.coalesce(func.sum(text_bytes()), 0)).where(here)
    turns, size = connection.execute(query).one()
    rewritten = _rewrite_dependents(connection, rollout_id, rule, repeats) if turns else 0
    if turns:
        nothing = {"request": None, "response": None, "request_base": None, "request_marks": None}
        its_links = TurnTexts.turn_id.in_(select(Turns.turn_id).where(here))
        shared = remove_links(connection, its_links)
        connection.execute(update(Turns).where(here).values(**nothing))
        remove_unused(connection, shared)
    spans = _drop_of_spans(connection, rollout_id, rule)
    if not turns and not spans:
        return {}
    counts = {"turns": int(turns), "retold": rewritten, "spans": spans, "bytes": int(size)}
    return {"rollouts": 1, **counts}


def _rewrite_dependents(
    connection: Connection, rollout_id: str, rule: TextRemovalRule, repeats: TextSightings
) -> int:
    """Encode those again that stay and are deltas to some that go."""
    stays = and_(Turns.rollout_id == rollout_id, Turns.created_at >= rule.before)
    if rule.before == float("inf") or not connection.scalar(
        select(Turns.turn_id).where(stays, Turns.request_base.is_not(None)).limit(1)
    ):
        return 0

    def dropped(texts: EditableTexts) -> EditableTexts:
        if texts.created_at >= rule.before:
            return texts
        return replace(texts, request=None, response=None)

    rewritten = rewritten_turns(connection, rollout_id, dropped, repeats)
    stay = [one for one in rewritten if not one.changed]
    write_rewritten(connection, stay)
    return len(stay)


def _drop_of_spans(connection: Connection, rollout_id: str, rule: TextRemovalRule) -> int:
    query = select_fields(Span, Spans).where(Spans.rollout_id == rollout_id, rule.spans())
    rows = rewritten_spans(load(connection, Span, query), without_texts_of_event)
    write_spans(connection, rows)
    return len(rows)
