"""Rollouts in the order that was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, func, select

from tracegrad.store import RolloutFilter, RolloutSummary, Store
from tracegrad.store.expressions import chunks, latest_reward
from tracegrad.store.models import Rollouts, Turns


class RolloutOrder(StrEnum):
    NEWEST = "newest"
    REWARD = "reward"
    TURNS = "turns"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class _WithIds(RolloutFilter):
    ids: tuple[str, ...]

    def where(self) -> ColumnElement[bool]:
        return Rollouts.rollout_id.in_(self.ids)


def list_ordered(
    store: Store, wanted: RolloutFilter, order: RolloutOrder, limit: int
) -> list[RolloutSummary]:
    """At most `limit`: the newest, or those with the most of what `order` names, first."""
    if order is RolloutOrder.NEWEST:
        return store.rollouts(wanted, limit=limit)
    # Their ids first: all else is asked for the few that are shown.
    by = _most(order)
    query = (
        select(Rollouts.rollout_id)
        .where(wanted.where())
        .order_by(func.coalesce(by, _NOTHING).desc(), Rollouts.opened_at.desc())
        .limit(limit)
    )
    with store.reading() as connection:
        ids = list(connection.scalars(query))
    rows = {
        row.rollout_id: row
        for some in chunks(ids)
        for row in store.rollouts(_WithIds(ids=tuple(some)), limit=None)
    }
    return [rows[rollout_id] for rollout_id in ids if rollout_id in rows]


# Below every reward: the databases disagree about where NULL sorts.
_NOTHING = -1e308


def _most(order: RolloutOrder) -> ColumnElement[Any]:
    if order is RolloutOrder.REWARD:
        return latest_reward()
    what = func.count() if order is RolloutOrder.TURNS else func.sum(Turns.completion_tokens)
    return select(what).where(Turns.rollout_id == Rollouts.rollout_id).scalar_subquery()
