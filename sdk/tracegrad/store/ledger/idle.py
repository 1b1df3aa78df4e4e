"""Rollouts that nobody opened, and that nobody will end: those that were idle for long are closed.

Idle is who has had no call for a time. Calls are dated by their proxy's clock, and the time that
passed is measured by the clock of leases: where the two differ, rollouts are closed by as much
earlier (a later call opens them again, `write.events`) or later.

Everything here happens inside the caller's transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Select, and_, func, select, update

from tracegrad.events import Outcome
from tracegrad.store.expressions import has_tags, newest_turn
from tracegrad.store.models import Rollouts

# That are closed in one transaction: proxies wait for it.
MOST_CLOSED = 1_000
# That are looked at for `inferred_open`.
MOST_LOOKED_AT = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class InferredOpen:
    """Rollouts with turns that nobody opened and that have no end, at most `MOST_LOOKED_AT`.
    `idle_for_s`: of the one without a call for the longest time; below 0 where the proxy's clock is
    ahead; None: there is none."""

    rollouts: int
    idle_for_s: float | None


def is_idle(before: float) -> ColumnElement[bool]:
    """Of `Rollouts`: nobody opened or ended it, and the newest of its turns, of which it has some,
    is older than `before`."""
    # A rollout is as old as the first of its turns, or older.
    return and_(_is_left_open(), Rollouts.opened_at < before, newest_turn() < before)


def idle_query(tags: Mapping[str, str], before: float, most: int) -> Select[str]:
    return select(Rollouts.rollout_id).where(is_idle(before), has_tags(tags)).limit(most)


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


def inferred_open(connection: Connection, tags: Mapping[str, str], now: float) -> InferredOpen:
    some = (
        select(newest_turn().label("at"))
        .where(_is_left_open(), has_tags(tags))
        .limit(MOST_LOOKED_AT)
        .subquery()
    )
    count, oldest = connection.execute(select(func.count(some.c.at), func.min(some.c.at))).one()
    return InferredOpen(rollouts=count, idle_for_s=None if oldest is None else now - oldest)


def _is_left_open() -> ColumnElement[bool]:
    return and_(
        Rollouts.consumed_at.is_(None),
        Rollouts.finished_at.is_(None),
        Rollouts.opened.is_(False),
    )
