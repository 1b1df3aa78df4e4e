"""Rollouts that nobody opened, and that nobody will end: those that were idle for long are closed.

Idle is who has had no call for a time. Calls are dated by their proxy's clock, and the time that
passed is measured by the clock of leases: where the two differ, rollouts are closed by as much
earlier (a later call opens them again, `write.events`) or later.

Everything here happens inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, Select, func, select, true, update

from tracegrad.events import Outcome
from tracegrad.store.expressions import has_tags, is_idle, is_left_open, newest_turn
from tracegrad.store.models import Rollouts
from tracegrad.store.types import InferredOpen

# That are closed in one transaction: proxies wait for it.
MOST_CLOSED = 1_000
# That are looked at to say how many there are, and how idle.
MOST_LOOKED_AT = 1_000


def idle_query(tags: Mapping[str, str], before: float, most: int) -> Select[str]:
    return select(Rollouts.rollout_id).where(is_idle(before), has_tags(tags)).limit(most)


def count_idle(connection: Connection, tags: Mapping[str, str], before: float) -> int:
    """At most `MOST_CLOSED`."""
    some = idle_query(tags, before, MOST_CLOSED).subquery()
    return connection.scalar(select(func.count()).select_from(some)) or 0


def close_idle(
    connection: Connection, rollout_ids: Sequence[str], before: float, idle_s: float, now: float
) -> list[str]:
    """Those of them that are still idle; they are completed `now`.

    Whoever adds a turn at this moment holds the rollout: it is passed over, for it is not idle.
    Who adds one after us waits for us, and opens the rollout again.
    """
    here = select(Rollouts.rollout_id).where(Rollouts.rollout_id.in_(rollout_ids))
    held = list(
        connection.scalars(here.order_by(Rollouts.rollout_id).with_for_update(skip_locked=True))
    )
    ending = {"outcome": Outcome.COMPLETED.value, "finished_at": now, "idle_s": idle_s}
    # In a statement of its own: PostgreSQL shows it what was committed until they were held.
    closing = update(Rollouts).where(Rollouts.rollout_id.in_(held), is_idle(before)).values(ending)
    return sorted(connection.scalars(closing.returning(Rollouts.rollout_id)))


def inferred_open(
    connection: Connection, tags: Mapping[str, str], now: float, *, since: float | None = None
) -> InferredOpen:
    """`since`: only those with a call since then."""
    awake = true() if since is None else newest_turn() >= since
    some = (
        select(newest_turn().label("at"))
        .where(is_left_open(), awake, has_tags(tags))
        .limit(MOST_LOOKED_AT)
        .subquery()
    )
    count, oldest = connection.execute(select(func.count(some.c.at), func.min(some.c.at))).one()
    return InferredOpen(rollouts=count, idle_for_s=None if oldest is None else now - oldest)
