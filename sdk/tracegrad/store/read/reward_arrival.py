"""What becomes of a reward: whether anybody knows its rollout, and whether it came in time.

Training takes a rollout's rewards when it leases the rollout. One that arrives later is kept and
shown, and changes no step. All times are the arrival's (`Rewards.created_at`), not the giver's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, case, func, or_, select

from tracegrad.store.expressions import has_turns
from tracegrad.store.models import Leases, Rewards, Rollouts
from tracegrad.store.rows import rows_of_keys
from tracegrad.store.types import JUDGE_SOURCE

# However many there are, so many of the newest are looked at.
RECENT_REWARDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTarget:
    """A rollout that was given a reward. `is_known`: somebody opened it, or a call belongs to it.

    `closed_at`: rewards that arrive later are too late, seconds since the epoch; None: none is.
    `state`: who closed it, and `step` the step that trained it.
    """

    rollout_id: str
    is_known: bool
    state: Literal["open", "leased", "trained", "skipped"]
    step: int | None
    closed_at: float | None


@dataclass(frozen=True, slots=True)
class LateRewards:
    """Of the newest `RECENT_REWARDS`; `last` is the number of the newest of all."""

    rewards: int
    rollouts: int
    last: int


def reward_targets(
    connection: Connection, rollout_ids: Collection[str], now: float
) -> list[RewardTarget]:
    """Those that are stored; `now` by the clock of leases."""
    leased = Rollouts.leased_until > now
    state = case(
        (Rollouts.consumed_step.is_not(None), "trained"),
        (Rollouts.consumed_at.is_not(None), "skipped"),
        (leased, "leased"),
        else_="open",
    )
    closed_at = case((state == "open", None), else_=_closed_at())
    query = select(
        Rollouts.rollout_id,
        (Rollouts.opened | has_turns()).label("is_known"),
        state.label("state"),
        Rollouts.consumed_step.label("step"),
        closed_at.label("closed_at"),
    )
    rows = rows_of_keys(connection, query, Rollouts.rollout_id, rollout_ids)
    found: list[dict[str, Any]] = [dict(row._mapping) for row in rows]
    return [RewardTarget(**{**row, "is_known": bool(row["is_known"])}) for row in found]


def reward_arrivals(connection: Connection, reward_ids: Collection[str]) -> dict[str, float]:
    """When each of those that are stored arrived first: a reward that is sent again, because its
    answer was lost, is the one that is there already."""
    query = select(Rewards.reward_id, Rewards.created_at)
    rows = rows_of_keys(connection, query, Rewards.reward_id, reward_ids)
    return {row.reward_id: row.created_at for row in rows}


def late_rewards(connection: Connection, now: float, *, after: int = 0) -> LateRewards:
    """Rewards that arrived when training had taken their rollouts'; those `after` a number of
    arrival. `now` by the clock of leases."""
    last = connection.scalar(select(func.max(Rewards.seq))) or 0
    query = (
        select(func.count(), func.count(Rewards.rollout_id.distinct()))
        .join(Rollouts, Rollouts.rollout_id == Rewards.rollout_id)
        .where(
            Rewards.seq > max(after, last - RECENT_REWARDS),
            Rewards.seq <= last,
            Rewards.source != JUDGE_SOURCE,
            or_(Rollouts.consumed_at.is_not(None), Rollouts.leased_until > now),
            Rewards.created_at > _closed_at(),
        )
    )
    rewards, rollouts = connection.execute(query).one()
    return LateRewards(rewards, rollouts, last)


def _closed_at() -> ColumnElement[float | None]:
    """When the lease began that a rollout is under, or was consumed under."""
    leased_at = (
        select(Leases.leased_at)
        .where(Leases.rollout_id == Rollouts.rollout_id, Leases.lease_id == Rollouts.lease_id)
        .correlate(Rollouts)
        .scalar_subquery()
    )
    return func.coalesce(leased_at, Rollouts.consumed_at)
