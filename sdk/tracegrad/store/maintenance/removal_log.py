"""What was taken out on purpose, counted, so that totals still add up afterwards."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, insert, select

from tracegrad.events import Json
from tracegrad.store.models import Removals

ROLLOUTS, TEXT, REDACTION, MENDS = "rollouts", "text", "redaction", "mends"


def record(connection: Connection, kind: str, rule: Json, removed: Json) -> None:
    """One row for each transaction that removes something, in that transaction.

    Writers see by it that what they remember of turns may not be true any more (`contexts`).
    """
    row = {"kind": kind, "created_at": time.time(), "rule": rule, "removed": removed}
    connection.execute(insert(Removals), row)


def removed_in_all(connection: Connection, kind: str = ROLLOUTS) -> Json:
    """Every removal of the kind added up."""
    total: Json = {}
    query = select(Removals.removed).where(Removals.kind == kind).order_by(Removals.seq)
    for removed in connection.scalars(query):
        total = added(total, removed)
    return total


def added(some: Json, more: Json) -> Json:
    """Counts of the same names added up, at any depth."""
    total: dict[str, Any] = dict(some)
    for name, value in more.items():
        if isinstance(value, dict):
            total[name] = added(total.get(name, {}), value)
        else:
            total[name] = total.get(name, 0) + value
    return total
