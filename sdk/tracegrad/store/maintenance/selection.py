"""Which rollouts care is taken of, and in which order: the oldest first, some at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, and_, func, select, true, tuple_

from tracegrad.events import Json
from tracegrad.store.filters import ALL, RolloutFilter
from tracegrad.store.models import Rollouts, Turns
from tracegrad.store.store import Store


class PageKey(NamedTuple):
    """A rollout's place in the order."""

    opened_at: float
    rollout_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSelection:
    """Rollouts that `wanted` describes; with `rollouts` only these, by their whole ids; with
    `before` only those that nothing has happened in since (seconds since the epoch)."""

    wanted: RolloutFilter = ALL
    rollouts: tuple[str, ...] = ()
    before: float | None = None

    @property
    def matches_all(self) -> bool:
        """Whether nothing is asked."""
        return self == RolloutSelection()

    def where(self) -> ColumnElement[bool]:
        """Of `Rollouts`."""
        asked = [true(), self.wanted.where()]
        if self.rollouts:
            asked.append(Rollouts.rollout_id.in_(self.rollouts))
        if self.before is not None:
            asked.append(last_activity() < self.before)
        return and_(*asked)

    def describe(self) -> Json:
        """As it was asked for, for `removals`."""
        asked = {**asdict(self.wanted), "rollouts": list(self.rollouts), "before": self.before}
        return {name: value for name, value in asked.items() if value not in (None, {}, [])}


EVERYTHING = RolloutSelection()


def last_activity() -> ColumnElement[float]:
    """When a rollout ended; of one that did not, when its last turn was captured."""
    last_turn = (
        select(func.max(Turns.created_at))
        .where(Turns.rollout_id == Rollouts.rollout_id)
        .correlate(Rollouts)
        .scalar_subquery()
    )
    return func.coalesce(Rollouts.finished_at, last_turn, Rollouts.opened_at)


def next_page(where: ColumnElement[bool], after: PageKey | None, limit: int) -> Select[float, str]:
    """The keys of the next rollouts for which `where` holds."""
    query = select(Rollouts.opened_at, Rollouts.rollout_id).where(where)
    if after is not None:
        query = query.where(tuple_(Rollouts.opened_at, Rollouts.rollout_id) > after)
    return query.order_by(Rollouts.opened_at, Rollouts.rollout_id).limit(limit)


def pages(store: Store, where: ColumnElement[bool], limit: int) -> Iterator[list[str]]:
    """Ids of all rollouts for which `where` holds; a page is read in a transaction of its own."""
    after: PageKey | None = None
    while True:
        with store.reading() as connection:
            keys = [PageKey(*row) for row in connection.execute(next_page(where, after, limit))]
        if not keys:
            return
        after = keys[-1]
        yield [key.rollout_id for key in keys]


def lock_next_page(
    connection: Connection, where: ColumnElement[bool], after: PageKey | None, limit: int
) -> list[PageKey]:
    """The next of them that nobody writes to now; nobody can until the transaction ends.

    Nothing that refers to a rollout can be added while its row is locked. Rollouts that somebody
    writes to at this moment are passed over, so that neither waits for the other.
    """
    query = next_page(where, after, limit).with_for_update(of=Rollouts, skip_locked=True)
    return [PageKey(*row) for row in connection.execute(query)]
