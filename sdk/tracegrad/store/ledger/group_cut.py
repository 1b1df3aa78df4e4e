"""Attempts beyond a group's (`over_sample`): which ones a group is cut by, and when they end.

They are known from the moment that the group is leased. One that still runs then ends in its own
time: nothing is aborted here, and all of it is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Connection, insert, or_, select

from tracegrad.store.expressions import is_selected
from tracegrad.store.ledger.leases import ReadyRollout
from tracegrad.store.models import OverSampled, Rollouts

OVER_SAMPLED = "over_sampled"  # the reason why their turns are not trained


def cut_groups(
    connection: Connection,
    groups: Sequence[Sequence[ReadyRollout]],
    attempts: int,
    lease_id: str,
    tags: Mapping[str, str],
    now: float,
    held: Collection[str] = (),
) -> None:
    """Marks the `attempts` oldest others of each group's task that are neither leased nor `held`.

    What was opened when the group was whole already belongs to a later group.
    """
    for group in groups:
        query = (
            select(Rollouts.rollout_id)
            .outerjoin(OverSampled, OverSampled.rollout_id == Rollouts.rollout_id)
            .where(
                OverSampled.rollout_id.is_(None),
                Rollouts.task_id == group[0].task_id,
                Rollouts.consumed_at.is_(None),
                or_(Rollouts.leased_until.is_(None), Rollouts.leased_until <= now),
                Rollouts.opened_at <= group[-1].finished_at,
                is_selected(tags),
            )
            .order_by(Rollouts.opened_at, Rollouts.rollout_id)
            .limit(attempts + len(held))
        )
        others = [name for name in connection.scalars(query) if name not in held][:attempts]
        rows = [{"rollout_id": one, "lease_id": lease_id, "created_at": now} for one in others]
        if rows:
            connection.execute(insert(OverSampled), rows)


def finished_cut(connection: Connection) -> list[str]:
    """Those that have ended and are not consumed."""
    query = (
        select(Rollouts.rollout_id)
        .join(OverSampled, OverSampled.rollout_id == Rollouts.rollout_id)
        .where(Rollouts.consumed_at.is_(None), Rollouts.finished_at.is_not(None))
        .order_by(Rollouts.rollout_id)
    )
    return list(connection.scalars(query))
