"""Which rollouts traces belong to, and which turns were called from which spans."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection, select

from tracegrad.store.models import Spans, Turns
from tracegrad.store.rows import rows_of_keys


def rollouts_of_traces(connection: Connection, trace_ids: Collection[str]) -> list[tuple[str, str]]:
    """Trace and rollout of all that are known; a trace may have several."""
    known = select(Spans.trace_id, Spans.rollout_id).where(Spans.rollout_id.is_not(None)).distinct()
    rows = rows_of_keys(connection, known, Spans.trace_id, sorted(trace_ids))
    return [(trace_id, rollout_id) for trace_id, rollout_id in rows if rollout_id is not None]


def calling_spans(connection: Connection, rollout_id: str, *, except_dialect: str) -> list[str]:
    """The spans that the rollout's turns were called from, but for turns of one dialect."""
    query = select(Turns.parent_span_id).where(
        Turns.rollout_id == rollout_id,
        Turns.parent_span_id.is_not(None),
        Turns.dialect != except_dialect,
    )
    return [span_id for span_id in connection.scalars(query) if span_id is not None]


def rollout_of_turn(connection: Connection, turn_id: str) -> str | None:
    return connection.scalar(select(Turns.rollout_id).where(Turns.turn_id == turn_id))


def turn_order(connection: Connection, rollout_id: str) -> Sequence[str]:
    """The ids of a rollout's turns in order of capture."""
    query = select(Turns.turn_id).where(Turns.rollout_id == rollout_id).order_by(Turns.seq)
    return list(connection.scalars(query))
