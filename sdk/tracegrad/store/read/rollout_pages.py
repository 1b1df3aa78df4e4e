"""Pages of rollouts by key, each of which costs the same however many rollouts there are.

A filter that few rollouts pass is not answered by looking through all of them: a page looks through
as many as there is time for, and says how far it came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, and_, func, or_, select, true

from tracegrad.store.expressions import begins_with
from tracegrad.store.filters import RolloutFilter
from tracegrad.store.models import Rollouts
from tracegrad.store.read.rollouts import load_summaries
from tracegrad.store.read.task_titles import load_inputs
from tracegrad.store.types import RolloutSummary

# Rollouts that the first look goes through; each further one through twice as many.
_FIRST_LOOK = 500
# Seconds that a page looks for rollouts that pass its filter.
SEARCH_S = 0.05


class RolloutKey(NamedTuple):
    """Where a rollout stands in the list, the newest first. Without an id: behind all of that
    moment."""

    opened_at: float
    rollout_id: str


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """`rows`: the newest first. `asked`: the beginning of their inputs, by rollout. `more`: there
    are others beyond the last, or may be. `searched_to`: the search ended there for want of time;
    None: it found a page, or everything."""

    rows: list[RolloutSummary]
    asked: dict[str, str]
    more: bool
    searched_to: float | None = None


def page_of_rollouts(
    connection: Connection,
    wanted: RolloutFilter,
    *,
    before: RolloutKey | None = None,
    limit: int,
    search_s: float = SEARCH_S,
    clock: Callable[[], float] = monotonic,
) -> RolloutPage:
    """Those behind `before`, the newest first, at most `limit`."""
    ids, searched_to = _matching(connection, wanted, before, limit + 1, search_s, clock)
    rows = load_summaries(connection, ids[:limit])
    return RolloutPage(
        rows,
        load_inputs(connection, [row.rollout_id for row in rows]),
        len(ids) > limit or searched_to is not None,
        searched_to,
    )


def page_after(
    connection: Connection, wanted: RolloutFilter, after: RolloutKey, *, limit: int
) -> list[str]:
    """The ids of those next newer than `after`, the oldest of them first."""
    query = (
        select(Rollouts.rollout_id)
        .where(_newer(after), wanted.where())
        .order_by(Rollouts.opened_at, Rollouts.rollout_id)
        .limit(limit)
    )
    return list(connection.scalars(query))


def newest_key(connection: Connection) -> RolloutKey | None:
    """Of all rollouts; None: there is none."""
    query = select(Rollouts.opened_at, Rollouts.rollout_id).order_by(*_newest_first()).limit(1)
    row = connection.execute(query).one_or_none()
    return RolloutKey(*row) if row is not None else None


def rollout_key(connection: Connection, rollout_id: str) -> RolloutKey | None:
    query = select(Rollouts.opened_at, Rollouts.rollout_id)
    row = connection.execute(query.where(Rollouts.rollout_id == rollout_id)).one_or_none()
    return RolloutKey(*row) if row is not None else None


def count_newer(
    connection: Connection, wanted: RolloutFilter, after: RolloutKey | None, *, most: int
) -> int:
    """How many rollouts that pass the filter are newer; at most `most` are counted."""
    newer = true() if after is None else _newer(after)
    some = select(Rollouts.rollout_id).where(newer, wanted.where())
    # The newest first: of very many newer ones only so many are looked at.
    some = some.order_by(*_newest_first()).limit(most)
    return connection.scalar(select(func.count()).select_from(some.subquery())) or 0


def ids_beginning_with(connection: Connection, prefix: str, *, limit: int) -> list[str]:
    """In the order of the ids."""
    query = select(Rollouts.rollout_id).where(begins_with(Rollouts.rollout_id, prefix))
    return list(connection.scalars(query.order_by(Rollouts.rollout_id).limit(limit)))


def _matching(
    connection: Connection,
    wanted: RolloutFilter,
    before: RolloutKey | None,
    limit: int,
    search_s: float,
    clock: Callable[[], float],
) -> tuple[list[str], float | None]:
    """The ids of a page, and how far the search came where that was not to its end."""
    if wanted.matches_all or wanted.task is not None:
        # The first rows are the page's; a task's are found by an index.
        return list(connection.scalars(_ids(wanted, before, limit))), None
    if wanted.until is not None and (before is None or before.opened_at > wanted.until):
        before = RolloutKey(wanted.until, "")
    began, look, found = clock(), _FIRST_LOOK, list[str]()
    while True:
        started = clock()
        bottom = _bottom(connection, before, look)
        if bottom is None:
            query = _ids(wanted, before, limit - len(found))
            return found + list(connection.scalars(query)), None
        query = _ids(wanted, before, limit - len(found)).where(Rollouts.opened_at >= bottom)
        found += connection.scalars(query)
        if len(found) >= limit:
            return found, None
        before = RolloutKey(bottom, "")
        if wanted.since is not None and bottom <= wanted.since:
            return found, None
        # The next look takes some twice as long as this one.
        now = clock()
        if now - began + 2 * (now - started) > search_s:
            return found, bottom
        look *= 2


def _bottom(connection: Connection, before: RolloutKey | None, rollouts: int) -> float | None:
    """When the last of so many rollouts was opened; None: there are not so many."""
    some = select(Rollouts.opened_at).order_by(Rollouts.opened_at.desc()).limit(rollouts)
    if before is not None and before.rollout_id:
        some = some.where(Rollouts.opened_at <= before.opened_at)
    elif before is not None:
        some = some.where(Rollouts.opened_at < before.opened_at)
    found = some.subquery()
    query = select(func.count(), func.min(found.c.opened_at))
    count, bottom = connection.execute(query).one()
    return bottom if count == rollouts else None


def _ids(wanted: RolloutFilter, before: RolloutKey | None, limit: int) -> Select[str]:
    older = true() if before is None else _older(before)
    query = select(Rollouts.rollout_id).where(older, wanted.where())
    return query.order_by(*_newest_first()).limit(limit)


def _newest_first() -> tuple[ColumnElement[float], ColumnElement[str]]:
    return Rollouts.opened_at.desc(), Rollouts.rollout_id.desc()


def _older(key: RolloutKey) -> ColumnElement[bool]:
    # The first half alone would do for an index; databases do not see that it follows.
    tied = and_(Rollouts.opened_at == key.opened_at, Rollouts.rollout_id < key.rollout_id)
    return and_(Rollouts.opened_at <= key.opened_at, or_(Rollouts.opened_at < key.opened_at, tied))


def _newer(key: RolloutKey) -> ColumnElement[bool]:
    tied = and_(Rollouts.opened_at == key.opened_at, Rollouts.rollout_id > key.rollout_id)
    return and_(Rollouts.opened_at >= key.opened_at, or_(Rollouts.opened_at > key.opened_at, tied))
