"""How many LLM calls rollouts have, and what came without a rollout's name while they had none."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from tracegrad.store.models import Outcomes, Rollouts, Turns
from tracegrad.store.rows import rows_of_keys

MOST_UNNAMED_CALLS = 1_000  # more are not counted
_LAST_MS = 0xFFFFFFFFFFFF  # since the epoch, of an id


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCount:
    """`turns` that are recorded of a rollout. `unnamed_calls`: of one without any, the calls that
    named no rollout and came while it was open, at most `MOST_UNNAMED_CALLS`; most likely some of
    them were meant for it."""

    rollout_id: str
    turns: int
    unnamed_calls: int = 0


def count_calls(connection: Connection, rollout_ids: Collection[str]) -> list[CallCount]:
    """Of those that are stored."""
    turns = (
        select(func.count())
        .where(Turns.rollout_id == Rollouts.rollout_id)
        .correlate(Rollouts)
        .scalar_subquery()
    )
    # The client's own clock, as of `opened_at`: the end may have waited for the proxy for long.
    ended_at = (
        select(func.min(Outcomes.finished_at))
        .where(Outcomes.rollout_id == Rollouts.rollout_id)
        .correlate(Rollouts)
        .scalar_subquery()
    )
    query = select(Rollouts.rollout_id, Rollouts.opened_at, ended_at, turns)
    rows = rows_of_keys(connection, query, Rollouts.rollout_id, rollout_ids)
    return [
        CallCount(
            rollout_id=rollout_id,
            turns=count,
            unnamed_calls=0 if count else _unnamed_calls(connection, opened_at, ended_at),
        )
        for rollout_id, opened_at, ended_at, count in [*rows]
    ]


def _unnamed_calls(connection: Connection, since: float, until: float | None) -> int:
    """The proxy makes rollouts for such calls, with ids that begin with the time (`new_id`); nobody
    opens them, or reports their end. Those that began before `since` are others' conversations."""
    until = time.time() if until is None else until
    some = (
        select(Turns.turn_id)
        .join(Rollouts, Rollouts.rollout_id == Turns.rollout_id)
        .where(
            # Not BETWEEN: PostgreSQL takes no collation in it.
            Rollouts.rollout_id >= _first_id(since),
            Rollouts.rollout_id <= _first_id(until + 1e-3),
            Rollouts.opened.is_(False),
            Rollouts.finished_at.is_(None) | Rollouts.idle_s.is_not(None),
        )
        .limit(MOST_UNNAMED_CALLS)
    )
    return connection.scalar(select(func.count()).select_from(some.subquery())) or 0


def _first_id(at: float) -> str:
    """Of those that are made at that time; a client may state any."""
    return f"{int(min(max(0.0, at * 1e3), _LAST_MS)):012x}"
