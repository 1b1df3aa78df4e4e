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
# So many rollouts of one task are read and put in order at once.
_SMALL_TASK = 2_000
# Seconds that a page looks for rollouts that pass its filter.
SEARCH_S = 0.05


class RolloutKey(NamedTuple):
    """Where a rollout stands in the list, the newest first. Without an id: behind all of that
    moment, whichever way the list is gone through."""

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


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The next that passes the filter. `rollout_id` None: there is none, or with `searched_to` the
    search ended there for want of time."""

    rollout_id: str | None
    searched_to: float | None = None


@dataclass(frozen=True, slots=True)
class NewerCount:
    """`complete`: there was time to count them all, or as many as were asked for."""

    count: int
    complete: bool


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
    search = _Search(connection, wanted, search_s, clock)
    ids, searched_to = search.run(before, limit + 1)
    rows = load_summaries(connection, ids[:limit])
    return RolloutPage(
        rows,
        load_inputs(connection, [row.rollout_id for row in rows]),
        len(ids) > limit or searched_to is not None,
        searched_to,
    )


def find_rollouts(
    connection: Connection,
    passing: ColumnElement[bool],
    *,
    before: RolloutKey | None = None,
    limit: int,
    search_s: float = SEARCH_S,
    clock: Callable[[], float] = monotonic,
) -> tuple[list[RolloutKey], float | None]:
    """Those behind `before` that pass a condition of `Rollouts`, the newest first, at most `limit`;
    and how far the search came where it ended for want of time."""
    search = _Search(connection, RolloutFilter(), search_s, clock, passing=passing)
    ids, searched_to = search.run(before, limit)
    query = select(Rollouts.opened_at, Rollouts.rollout_id).order_by(*newest_first())
    rows = connection.execute(query.where(Rollouts.rollout_id.in_(ids)))
    return [RolloutKey(*row) for row in rows], searched_to


def next_rollout(
    connection: Connection,
    wanted: RolloutFilter,
    beside: RolloutKey,
    *,
    newer: bool,
    search_s: float = SEARCH_S,
    clock: Callable[[], float] = monotonic,
) -> Neighbour:
    """The one that is next newer than `beside`, or next older."""
    search = _Search(connection, wanted, search_s, clock, upwards=newer)
    ids, searched_to = search.run(beside, 1)
    return Neighbour(next(iter(ids), None), searched_to if not ids else None)


def newest_key(connection: Connection) -> RolloutKey | None:
    """Of all rollouts; None: there is none."""
    query = select(Rollouts.opened_at, Rollouts.rollout_id).order_by(*newest_first()).limit(1)
    row = connection.execute(query).one_or_none()
    return RolloutKey(*row) if row is not None else None


def rollout_key(connection: Connection, rollout_id: str) -> RolloutKey | None:
    query = select(Rollouts.opened_at, Rollouts.rollout_id)
    row = connection.execute(query.where(Rollouts.rollout_id == rollout_id)).one_or_none()
    return RolloutKey(*row) if row is not None else None


def count_newer(
    connection: Connection,
    wanted: RolloutFilter,
    after: RolloutKey | None,
    *,
    most: int,
    search_s: float = SEARCH_S,
    clock: Callable[[], float] = monotonic,
) -> NewerCount:
    """How many rollouts that pass the filter are newer; at most `most` are counted."""
    # The newest first: of very many newer ones only so many are looked at.
    search = _Search(connection, wanted, search_s, clock, stop=after)
    ids, searched_to = search.run(None, most)
    return NewerCount(len(ids), searched_to is None)


def ids_beginning_with(connection: Connection, prefix: str, *, limit: int) -> list[str]:
    """In the order of the ids."""
    query = select(Rollouts.rollout_id).where(begins_with(Rollouts.rollout_id, prefix))
    return list(connection.scalars(query.order_by(Rollouts.rollout_id).limit(limit)))


@dataclass(frozen=True, slots=True)
class _Search:
    """Looks for rollouts that pass a filter, from a key on and for `search_s` at most. `upwards`:
    towards newer ones, the oldest first. `stop`: downwards, no further than to this one.
    `passing`: a condition besides the filter's."""

    connection: Connection
    wanted: RolloutFilter
    search_s: float
    clock: Callable[[], float]
    upwards: bool = False
    stop: RolloutKey | None = None
    passing: ColumnElement[bool] | None = None

    def run(self, key: RolloutKey | None, limit: int) -> tuple[list[str], float | None]:
        """At most `limit` ids, and how far the search came where that was not to its end."""
        if self._matches_all() or self._is_of_small_task():
            return list(self.connection.scalars(self._ids(key, limit))), None
        key = self._first_key(key)
        began, look, found = self.clock(), _FIRST_LOOK, list[str]()
        while True:
            started = self.clock()
            end = self._end_of_look(key, look)
            query = self._ids(key, limit - len(found), by_moment=True)
            if end is None:
                return found + list(self.connection.scalars(query)), None
            found += self.connection.scalars(query.where(self._up_to(end)))
            if len(found) >= limit or self._is_beyond_filter(end):
                return found, None
            key = RolloutKey(end, "")
            # The next look takes some twice as long as this one.
            now = self.clock()
            if now - began + 2 * (now - started) > self.search_s:
                return found, end
            look *= 2

    def _matches_all(self) -> bool:
        return self.wanted.matches_all and self.passing is None

    def _is_of_small_task(self) -> bool:
        """A task's rollouts are found by an index, which has them in no order."""
        if self.wanted.task is None:
            return False
        some = select(Rollouts.rollout_id).where(RolloutFilter(task=self.wanted.task).where())
        counted = select(func.count()).select_from(some.limit(_SMALL_TASK + 1).subquery())
        return (self.connection.scalar(counted) or 0) <= _SMALL_TASK

    def _first_key(self, key: RolloutKey | None) -> RolloutKey | None:
        """Past what the filter's times exclude."""
        until = self.wanted.until
        if self.upwards or until is None or (key is not None and key.opened_at <= until):
            return key
        return RolloutKey(until, "")

    def _is_beyond_filter(self, moment: float) -> bool:
        if self.upwards:
            return self.wanted.until is not None and moment >= self.wanted.until
        return self.wanted.since is not None and moment <= self.wanted.since

    def _end_of_look(self, key: RolloutKey | None, rollouts: int) -> float | None:
        """When the last of so many rollouts was opened; None: there are not so many."""
        moment = Rollouts.opened_at
        some = select(moment).where(self._beyond(key)).limit(rollouts)
        found = some.order_by(moment if self.upwards else moment.desc()).subquery()
        last = func.max if self.upwards else func.min
        query = select(func.count(), last(found.c.opened_at))
        count, end = self.connection.execute(query).one()
        return end if count == rollouts else None

    def _ids(self, key: RolloutKey | None, limit: int, *, by_moment: bool = False) -> Select[str]:
        """`by_moment`: of a few moments, so that the index of tasks is of no use."""
        passes = self.wanted.where(by_task_index=not by_moment)
        if self.passing is not None:
            passes = and_(passes, self.passing)
        query = select(Rollouts.rollout_id).where(self._beyond(key), passes)
        order = _oldest_first() if self.upwards else newest_first()
        return query.order_by(*order).limit(limit)

    def _beyond(self, key: RolloutKey | None) -> ColumnElement[bool]:
        wanted = true() if self.stop is None else _newer(self.stop)
        if key is None:
            return wanted
        return and_(wanted, _newer(key) if self.upwards else _older(key))

    def _up_to(self, moment: float) -> ColumnElement[bool]:
        return Rollouts.opened_at <= moment if self.upwards else Rollouts.opened_at >= moment


def newest_first() -> tuple[ColumnElement[float], ColumnElement[str]]:
    return Rollouts.opened_at.desc(), Rollouts.rollout_id.desc()


def _oldest_first() -> tuple[ColumnElement[float], ColumnElement[str]]:
    return Rollouts.opened_at.asc(), Rollouts.rollout_id.asc()


def _older(key: RolloutKey) -> ColumnElement[bool]:
    if not key.rollout_id:
        return Rollouts.opened_at < key.opened_at
    # The first half alone would do for an index; databases do not see that it follows.
    tied = and_(Rollouts.opened_at == key.opened_at, Rollouts.rollout_id < key.rollout_id)
    return and_(Rollouts.opened_at <= key.opened_at, or_(Rollouts.opened_at < key.opened_at, tied))


def _newer(key: RolloutKey) -> ColumnElement[bool]:
    if not key.rollout_id:
        return Rollouts.opened_at > key.opened_at
    tied = and_(Rollouts.opened_at == key.opened_at, Rollouts.rollout_id > key.rollout_id)
    return and_(Rollouts.opened_at >= key.opened_at, or_(Rollouts.opened_at > key.opened_at, tied))
