"""What was taken out on purpose, counted, so that totals still add up afterwards."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, insert, select

from tracegrad.events import Json
from tracegrad.store.models import Removals

ROLLOUTS, TEXT, REDACTION, REPAIRS = "rollouts", "text", "redaction", "mends"


def record_removal(connection: Connection, kind: str, rule: Json, removed: Json) -> None:
    """One row for each transaction that removes something, in that transaction.

    Writers see by it that `write.parent_cache` may not be true any more.
    """
    row = {"kind": kind, "created_at": time.time(), "rule": rule, "removed": removed}
    connection.execute(insert(Removals), row)


def total_removed(connection: Connection, kind: str = ROLLOUTS) -> Json:
    """Every removal of the kind added up."""
    total: Json = {}
    query = select(Removals.removed).where(Removals.kind == kind).order_by(Removals.seq)
    for removed in connection.scalars(query):
        total = add_counts(total, removed)
    return total


def add_counts(some: Json, more: Json) -> Json:
    """Counts of the same names added up, at any depth."""
    total: dict[str, Any] = dict(some)
    for name, value in more.items():
        if isinstance(value, dict):
            total[name] = add_counts(total.get(name, {}), value)
        else:
            total[name] = total.get(name, 0) + value
    return total
