"""Rollouts that nobody opened: conversations whose calls name none, as the proxy found them."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from tracegrad.store.models import Rollouts, Turns

# Of the newest turns, whatever rollout they are of: a bound for stores of millions.
LOOKED_AT = 8_192


def recent_inferred(connection: Connection, most: int) -> list[str]:
    """Those with the newest of all turns, the newest first; closed ones too: a call may open them
    again."""
    newest = (
        select(Turns.rollout_id, Turns.seq).order_by(Turns.seq.desc()).limit(LOOKED_AT).subquery()
    )
    query = (
        select(newest.c.rollout_id)
        .join(Rollouts, Rollouts.rollout_id == newest.c.rollout_id)
        .where(Rollouts.opened.is_(False))
        .group_by(newest.c.rollout_id)
        .order_by(func.max(newest.c.seq).desc())
        .limit(most)
    )
    return list(connection.scalars(query))
