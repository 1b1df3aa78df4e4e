"""Finished rollouts that training may take and that have no reward, in the order of their ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, and_, exists, or_, select

from tracegrad.store.expressions import (
    SCORED_OUTCOMES,
    has_tags,
    has_turns,
    is_held_out,
    latest_reward,
)
from tracegrad.store.models import OverSampled, Rollouts
from tracegrad.store.rows import load


@dataclass(frozen=True, slots=True)
class UnrewardedRollout:
    rollout_id: str
    task_id: str | None
    finished_at: float


def finished_without_reward(
    connection: Connection,
    tags: Mapping[str, str],
    *,
    after: tuple[float, str],
    before: float,
    limit: int,
    composed: bool = False,
    held_out: Mapping[str, str] | None = None,
) -> list[UnrewardedRollout]:
    """The oldest `limit` of those that ended after `after` (time, rollout id) and not after
    `before`. `composed`: as `latest_reward` has it."""
    time, name = after
    ended = Rollouts.finished_at
    query = (
        select(Rollouts.rollout_id, Rollouts.task_id, ended)
        .where(
            Rollouts.consumed_at.is_(None),
            ended >= time,
            ended <= before,
            or_(ended > time, and_(ended == time, Rollouts.rollout_id > name)),
            Rollouts.outcome.in_(SCORED_OUTCOMES),
            latest_reward(composed=composed).is_(None),
            has_turns(),
            has_tags(tags),
            ~is_held_out(held_out),
            ~exists().where(OverSampled.rollout_id == Rollouts.rollout_id),
        )
        .order_by(ended, Rollouts.rollout_id)
        .limit(limit)
    )
    return load(connection, UnrewardedRollout, query)
