"""What becomes of a reward: whether anybody knows its rollout, and whether it came in time.

Training takes a rollout's rewards when it leases the rollout. One that arrives later is kept and
shown, and changes no step. What came first is told by numbers, not by clocks: the lease notes the
rollout's newest reward that it saw (`Leases.newest_reward`), and a later one has a higher number.

SQLite numbers rewards as it commits them: this is exact. PostgreSQL numbers them before it commits
them. A reward with a higher number is one that the lease did not see, without exception. One that
the lease did not see has a lower number only if another transaction rewarded the same rollout at
the same time, was numbered later, and was committed before the lease: then the newer one counts if
both have one name and turn, and else the older one, which training lacks, is not called late.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Select, and_, case, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute

from tracegrad.store.expressions import has_turns
from tracegrad.store.models import Leases, Rewards, Rollouts
from tracegrad.store.rows import Columns, rows_of_keys
from tracegrad.store.types import JUDGE_SOURCE

# However many there are, so many of the newest are looked at.
RECENT_REWARDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTarget:
    """A rollout that was given a reward. `is_known`: somebody opened it, or a call belongs to it.

    `state`: `open`, or who took its rewards, and `step` the step that trained it.
    """

    rollout_id: str
    is_known: bool
    state: Literal["open", "leased", "trained", "skipped"]
    step: int | None


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
    query = select(
        Rollouts.rollout_id,
        (Rollouts.opened | has_turns()).label("is_known"),
        state.label("state"),
        Rollouts.consumed_step.label("step"),
    )
    rows = rows_of_keys(connection, query, Rollouts.rollout_id, rollout_ids)
    found: list[dict[str, Any]] = [dict(row._mapping) for row in rows]
    return [RewardTarget(**{**row, "is_known": bool(row["is_known"])}) for row in found]


def late_reward_ids(
    connection: Connection, column: InstrumentedAttribute[str], keys: Collection[str], now: float
) -> frozenset[str]:
    """Of the rewards whose `column` is one of `keys`, those that arrived when training had taken
    their rollouts'. One that is sent again, because its answer was lost, is the one that is there
    already. `now` by the clock of leases."""
    query = _with_leases(select(Rewards.reward_id)).where(_came_late(now))
    return frozenset(row.reward_id for row in rows_of_keys(connection, query, column, keys))


def late_rewards(connection: Connection, now: float, *, after: int = 0) -> LateRewards:
    """Rewards that arrived when training had taken their rollouts'; those `after` a number of
    arrival. `now` by the clock of leases."""
    last = connection.scalar(select(func.max(Rewards.seq))) or 0
    query = _with_leases(select(func.count(), func.count(Rewards.rollout_id.distinct()))).where(
        Rewards.seq > max(after, last - RECENT_REWARDS), Rewards.seq <= last, _came_late(now)
    )
    rewards, rollouts = connection.execute(query).one()
    return LateRewards(rewards, rollouts, last)


def _with_leases(query: Select[*Columns]) -> Select[*Columns]:
    """Of `Rewards`, with their rollouts and the leases that these are under, or were consumed
    under."""
    lease = and_(Leases.rollout_id == Rollouts.rollout_id, Leases.lease_id == Rollouts.lease_id)
    return query.join(Rollouts, Rollouts.rollout_id == Rewards.rollout_id).outerjoin(Leases, lease)


def _came_late(now: float) -> ColumnElement[bool]:
    """Without a number (leases of before revision 0010; rollouts consumed without one, because they
    are not scored) by the clocks of the proxy and the database."""
    taken_at = func.coalesce(Leases.leased_at, Rollouts.consumed_at)
    return and_(
        Rewards.source != JUDGE_SOURCE,
        or_(Rollouts.consumed_at.is_not(None), Rollouts.leased_until > now),
        case(
            (Leases.newest_reward.is_not(None), Rewards.seq > Leases.newest_reward),
            else_=Rewards.created_at > taken_at,
        ),
    )
