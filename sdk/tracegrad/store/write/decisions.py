"""What people and guards decide about policy versions and training; rank 0 acts on it.

A decision is written once. What rank 0 did about it is noted beside it, once too, so that a trainer
that starts again knows what it has not acted on yet.
"""

from __future__ import annotations

import time
from collections import Counter

from sqlalchemy import Connection, func, insert, select, update

from tracegrad.events import Json
from tracegrad.store.models import Decisions
from tracegrad.store.rows import load, select_fields
from tracegrad.store.types import Decision

_GIVEN = ("kind", "version", "training", "by", "reason", "created_at")


def decide(connection: Connection, decision: Decision) -> int:
    """Its number (`Decision.seq`); later decisions have higher ones."""
    row = {name: getattr(decision, name) for name in _GIVEN}
    return connection.execute(insert(Decisions).values(row).returning(Decisions.seq)).scalar_one()


def decisions(connection: Connection, after: int = 0) -> list[Decision]:
    """Those with a number above `after`, the first one first."""
    query = select_fields(Decision, Decisions).where(Decisions.seq > after).order_by(Decisions.seq)
    return load(connection, Decision, query)


def newest_decisions(connection: Connection, limit: int, *, acted: bool = False) -> list[Decision]:
    """The newest first. `acted`: those that rank 0 acted on, or refused."""
    query = select_fields(Decision, Decisions).order_by(Decisions.seq.desc()).limit(limit)
    if acted:
        query = query.where(Decisions.acted_at.is_not(None))
    return load(connection, Decision, query)


def count_decisions(connection: Connection) -> dict[tuple[str, str], int]:
    """By kind and by who decided: `guard`, `gate`, or `person`."""
    query = select(Decisions.kind, Decisions.by, func.count()).group_by(
        Decisions.kind, Decisions.by
    )
    counts: Counter[tuple[str, str]] = Counter()
    for kind, by, count in connection.execute(query):
        who, _, rest = by.partition(":")
        counts[kind, who if rest and who in ("guard", "gate") else "person"] += count
    return dict(counts)


def open_decisions(connection: Connection) -> list[Decision]:
    """Those that nobody has acted on, the first one first."""
    query = select_fields(Decision, Decisions).order_by(Decisions.seq)
    return load(connection, Decision, query.where(Decisions.acted_at.is_(None)))


def close_decision(connection: Connection, seq: int, outcome: Json) -> None:
    """What was done about it, or why nothing was ("refused"). ValueError: it is closed."""
    changed = connection.execute(
        update(Decisions)
        .where(Decisions.seq == seq, Decisions.acted_at.is_(None))
        .values(acted_at=time.time(), outcome=outcome)
    )
    if changed.rowcount != 1:
        known = connection.scalar(select(Decisions.seq).where(Decisions.seq == seq))
        raise ValueError(f"seq: decision {seq} " + ("is unknown" if known is None else "is closed"))
