"""Whole rollouts out of the store: by age, by size, by any filter; trained ones first.

Unless asked for, only rollouts go that training is done with: consumed ones (each turn
trained or skipped), and those that ended in a way that is never trained. What is removed is
counted in `removals` by what had become of it; steps and versions stay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    case,
    delete,
    func,
    literal,
    not_,
    or_,
    select,
)

from tracegrad.events import Json
from tracegrad.store.databases.upkeep import upkeep_of
from tracegrad.store.encoding.shared_texts import remove_links, remove_unused
from tracegrad.store.expressions import SCORED_OUTCOMES, is_held_out, training_state
from tracegrad.store.maintenance.removal_log import ROLLOUTS, add_counts, record_removal
from tracegrad.store.maintenance.selection import (
    PageKey,
    RolloutSelection,
    lock_next_page,
    next_page,
)
from tracegrad.store.maintenance.sizes import all_bytes, rollout_bytes
from tracegrad.store.models import (
    Leases,
    Outcomes,
    OverSampled,
    Rewards,
    RolloutKeys,
    RolloutPlaces,
    Rollouts,
    RolloutTags,
    Scorings,
    Spans,
    TurnLedger,
    Turns,
    TurnTexts,
)
from tracegrad.store.rows import chunks
from tracegrad.store.store import Store
from tracegrad.store.types import LATE

# Rollouts of one transaction, and the bytes of which no more are added: proxies wait for it.
MAX_ROLLOUTS_PER_TRANSACTION, _BYTES_AT_ONCE = 200, 16 << 20
_LOOKED_AT = 1000

Progress = Callable[[Json], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRule:
    """What may go. `max_bytes`: the oldest, until the store takes no more than that."""

    selection: RolloutSelection
    max_bytes: int | None = None
    also_untrained: bool = False

    def passes(self) -> Iterator[ColumnElement[bool]]:
        """Of `Rollouts`: what may go, and what only once none of that is left."""
        where = self.selection.where()
        yield and_(where, training_is_done())
        if self.also_untrained:
            yield and_(where, not_(training_is_done()))

    def describe(self) -> Json:
        more = {"max_bytes": self.max_bytes, "also_untrained": self.also_untrained or None}
        return self.selection.describe() | {k: v for k, v in more.items() if v is not None}


@dataclass(frozen=True, slots=True)
class PrunePreview:
    """What would go, as `removed` is counted, and how many of the selection would stay because
    training is not done with them, by state."""

    removed: Json
    kept: dict[str, int]
    used_bytes: int


def training_is_done() -> ColumnElement[bool]:
    """Training will not ask for the rollout any more."""
    never = and_(Rollouts.finished_at.is_not(None), Rollouts.outcome.not_in(SCORED_OUTCOMES))
    held_out = and_(Rollouts.finished_at.is_not(None), is_held_out())
    return or_(Rollouts.consumed_at.is_not(None), never, held_out)


def used_bytes(store: Store, connection: Connection) -> int:
    """What the store takes, without room that is free inside the database's files."""
    used = upkeep_of(store.database).used_bytes(connection)
    return all_bytes(connection) if used is None else used


def preview_prune(store: Store, rule: RetentionRule) -> PrunePreview:
    removed: Json = _nothing()
    with store.reading() as connection:
        used = used_bytes(store, connection)
        left = _to_remove(connection, rule, used)
        for where in rule.passes():
            for state, turns, size in _candidates(connection, where):
                if left is not None and left <= 0:
                    break
                left = None if left is None else left - size
                one = {"rollouts": 1, "turns": turns, "by_state": {state: 1}, "bytes": size}
                removed = add_counts(removed, one)
        kept = {} if rule.also_untrained else _waiting(connection, rule)
    return PrunePreview(removed, kept, used)


def prune(
    store: Store,
    rule: RetentionRule,
    *,
    progress: Progress = lambda _: None,
    at_once: int = MAX_ROLLOUTS_PER_TRANSACTION,
) -> Json:
    """Remove them, some at a time. Returns what went: what `removals` has, added up.

    Rollouts that a proxy writes to at this moment stay.
    """
    with store.reading() as connection:
        left = _to_remove(connection, rule, used_bytes(store, connection))
    total = _nothing()
    for where in rule.passes():
        after: PageKey | None = None
        while left is None or left > 0:
            with store.exclusive() as connection:
                keys = lock_next_page(connection, where, after, at_once)
                if not keys:
                    break
                keys = _as_many(connection, keys, left)
                removed = _remove(connection, [key.rollout_id for key in keys])
                record_removal(connection, ROLLOUTS, rule.describe(), removed)
            after = keys[-1]
            total = add_counts(total, removed)
            left = None if left is None else left - removed["bytes"]
            progress(total)
    return add_counts(total, _prune_spans_without_rollout(store, rule, at_once))


def _nothing() -> Json:
    return {"rollouts": 0, "turns": 0, "bytes": 0}


def _to_remove(connection: Connection, rule: RetentionRule, used: int) -> int | None:
    """How many bytes, in the measure of `rollout_bytes`; None: all that may go."""
    if rule.max_bytes is None:
        return None
    if used <= rule.max_bytes:
        return 0
    return math.ceil(all_bytes(connection) * (used - rule.max_bytes) / used)


def _state() -> ColumnElement[str]:
    """`training_state`, and of consumed rollouts whether a step trained on them."""
    return case(
        (Rollouts.consumed_step.is_not(None), literal("trained")),
        (Rollouts.consumed_at.is_not(None), literal("skipped")),
        else_=training_state({}, time.time()),
    )


def _candidates(
    connection: Connection, where: ColumnElement[bool]
) -> Iterator[tuple[str, int, int]]:
    """State, turns and bytes of each, the oldest first."""
    after: PageKey | None = None
    while True:
        query = next_page(where, after, _LOOKED_AT).add_columns(
            _state().label("state"), _turns_of().label("turns"), rollout_bytes().label("size")
        )
        rows = connection.execute(query).all()
        for opened_at, rollout_id, state, turns, size in rows:
            after = PageKey(opened_at, rollout_id)
            yield state, int(turns), int(size)
        if len(rows) < _LOOKED_AT:
            return


def _turns_of() -> ColumnElement[int]:
    turns = select(func.count()).where(Turns.rollout_id == Rollouts.rollout_id)
    return turns.correlate(Rollouts).scalar_subquery()


def _waiting(connection: Connection, rule: RetentionRule) -> dict[str, int]:
    where = and_(rule.selection.where(), not_(training_is_done()))
    return _grouped(connection, select(_state().label("what")).where(where))


def _grouped(connection: Connection, each: Select[Any]) -> dict[str, int]:
    """How often each value of the column `what` comes."""
    found = each.subquery()
    query = select(found.c.what, func.count()).group_by(found.c.what)
    return {str(what): count for what, count in connection.execute(query)}


def _as_many(connection: Connection, keys: Sequence[PageKey], left: int | None) -> list[PageKey]:
    """The first that together are so many bytes, and no more than a transaction should remove."""
    room = _BYTES_AT_ONCE if left is None else min(left, _BYTES_AT_ONCE)
    ids = [key.rollout_id for key in keys]
    query = select(Rollouts.rollout_id, rollout_bytes()).where(Rollouts.rollout_id.in_(ids))
    sizes = {rollout_id: int(size) for rollout_id, size in connection.execute(query)}
    chosen = []
    for key in keys:
        if room <= 0:
            break
        chosen.append(key)
        room -= sizes[key.rollout_id]
    return chosen


_OF_A_ROLLOUT = (
    *(Turns, Spans, Scorings, Rewards, Outcomes, RolloutTags),
    *(RolloutKeys, RolloutPlaces, Leases, OverSampled),
)


def _remove(connection: Connection, ids: Sequence[str]) -> Json:
    """All that belongs to the rollouts, which are locked. Returns the counts."""
    removed = _counted(connection, ids)
    turns = select(Turns.turn_id).where(Turns.rollout_id.in_(ids))
    connection.execute(delete(TurnLedger).where(TurnLedger.turn_id.in_(turns)))
    shared = remove_links(connection, TurnTexts.turn_id.in_(turns))
    # Turns refer to each other: databases check that when the whole statement is done.
    for table in _OF_A_ROLLOUT:
        gone = connection.execute(delete(table).where(table.rollout_id.in_(ids))).rowcount
        removed[table.__tablename__] = gone
    removed["rollouts"] = connection.execute(
        delete(Rollouts).where(Rollouts.rollout_id.in_(ids))
    ).rowcount
    removed["texts"] = remove_unused(connection, shared)
    return removed


def _counted(connection: Connection, ids: Sequence[str]) -> Json:
    """By what had become of them, in the words of `Store.turn_counts`."""
    here = Rollouts.rollout_id.in_(ids)
    turns = (
        select(literal(1))
        .select_from(Turns)
        .join(Rollouts, Rollouts.rollout_id == Turns.rollout_id)
        .outerjoin(TurnLedger, TurnLedger.turn_id == Turns.turn_id)
        .where(here)
        .with_only_columns
    )
    steps = _grouped(connection, turns(TurnLedger.step.label("what")).where(TurnLedger.step >= 0))
    skipped = _grouped(
        connection,
        turns(TurnLedger.skip_reason.label("what")).where(TurnLedger.skip_reason.is_not(None)),
    )
    pending = _grouped(
        connection,
        turns(training_state({}, time.time()).label("what")).where(TurnLedger.turn_id.is_(None)),
    )
    if late := pending.pop("consumed", 0):
        skipped[LATE] = skipped.get(LATE, 0) + late
    return {
        "by_state": _grouped(connection, select(_state().label("what")).where(here)),
        "trained": sum(steps.values()),
        "steps": steps,
        "skipped": skipped,
        "pending": pending,
        "bytes": int(connection.scalar(select(func.sum(rollout_bytes())).where(here)) or 0),
    }


def _prune_spans_without_rollout(store: Store, rule: RetentionRule, at_once: int) -> Json:
    """Spans of no rollout, where age alone decides."""
    before = rule.selection.before
    if (
        before is None
        or rule.selection != RolloutSelection(before=before)
        or rule.max_bytes is not None
    ):
        return {}
    total: Json = {}
    where = and_(Spans.rollout_id.is_(None), Spans.start_ns < round(before * 1e9))
    while True:
        with store.exclusive() as connection:
            query = select(Spans.trace_id).where(where).distinct().limit(at_once)
            traces = list(connection.scalars(query))
            if not traces:
                return total
            gone = sum(
                connection.execute(delete(Spans).where(where, Spans.trace_id.in_(some))).rowcount
                for some in chunks(traces)
            )
            removed = {"loose_spans": gone}
            record_removal(connection, ROLLOUTS, rule.describe(), removed)
        total = add_counts(total, removed)
