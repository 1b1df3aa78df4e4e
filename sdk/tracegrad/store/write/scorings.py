"""How a scorer ended with rollouts, and the rewards that it gave: in one transaction, once."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, or_, select, update

from tracegrad.events import Reward
from tracegrad.store.databases import insert_new
from tracegrad.store.models import Rollouts, Scorings
from tracegrad.store.rows import column_values
from tracegrad.store.types import Scoring
from tracegrad.store.write.events import add_rewards, lock_rollouts
from tracegrad.store.write.turn_rows import ColumnValues


class ScoredMeanwhile(Exception):
    """Another worker has written one of the outcomes, or a rollout is gone; nothing is stored."""


def add_scorings(
    connection: Connection,
    scorings: Sequence[Scoring],
    rewards: Sequence[Reward],
    *,
    task_id: str | None = None,
    replaces: str = "",
) -> None:
    """All of them, and the rewards. `task_id`: their rollouts were scored as a group, and become
    attempts at that task, unless they have one that does not begin with `replaces`.

    Raises:
        ScoredMeanwhile: one of them is there already, or its rollout is not, or has got a task or
            been trained meanwhile.
        EventRejected: a reward is no use.
    """
    ids = sorted({each.rollout_id for each in scorings} | {each.rollout_id for each in rewards})
    # Held, in order, so that nobody removes them meanwhile.
    lock_rollouts(connection, ids)
    there = set(connection.scalars(select(Rollouts.rollout_id).where(Rollouts.rollout_id.in_(ids))))
    if there != set(ids):
        raise ScoredMeanwhile(f"rollout {min(set(ids) - there)} was removed")
    rows = [
        column_values(scoring, Scorings)
        | {"parts": None if scoring.parts is None else dict(scoring.parts)}
        for scoring in scorings
    ]
    if rows and _insert(connection, rows) != len(rows):
        raise ScoredMeanwhile("another worker scored one of these rollouts meanwhile")
    add_rewards(connection, rewards)
    if task_id is not None:
        _group(connection, [each.rollout_id for each in scorings], task_id, replaces)


def _group(connection: Connection, rollout_ids: Sequence[str], task_id: str, replaces: str) -> None:
    free = or_(Rollouts.task_id.is_(None), Rollouts.task_id.startswith(replaces, autoescape=True))
    found = connection.execute(
        update(Rollouts)
        .where(Rollouts.rollout_id.in_(rollout_ids), free, Rollouts.consumed_at.is_(None))
        .values(task_id=task_id)
    )
    if found.rowcount != len(set(rollout_ids)):
        raise ScoredMeanwhile("a rollout of the group has a task by now, or is trained")


def _insert(connection: Connection, rows: Sequence[ColumnValues]) -> int:
    """How many were new."""
    # Of inserts SQLAlchemy forgets the count, unless it is asked to keep it.
    wanted = {"preserve_rowcount": True}
    statement = insert_new(connection, Scorings)
    return connection.execute(statement, rows, execution_options=wanted).rowcount
