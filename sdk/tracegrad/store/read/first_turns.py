"""The first turn of each rollout that was opened lately: where its conversation began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, exists, func, select
from sqlalchemy.orm import aliased

from tracegrad.store.expressions import has_tags
from tracegrad.store.models import RolloutPlaces, Rollouts, RolloutTags, Turns


@dataclass(frozen=True, slots=True)
class FirstTurn:
    rollout_id: str
    turn_id: str
    opened_at: float


def newest_first_turns(
    connection: Connection,
    *,
    tags: Mapping[str, str],
    without: str,
    named_by: str,
    since: float,
    limit: int,
) -> list[FirstTurn]:
    """Of rollouts with all `tags`, without any tag of the key `without`, whose id no other rollout
    has as its tag `named_by`; the newest `limit` that were opened at `since` or later, newest
    first. None that a driver had a place for: a turn may be stored before the tags are."""
    tag, names = aliased(RolloutTags), aliased(RolloutTags)
    turns = aliased(Turns)
    first = (
        select(func.min(turns.seq))
        .where(turns.rollout_id == Rollouts.rollout_id)
        .correlate(Rollouts)
        .scalar_subquery()
    )
    query = (
        select(Rollouts.rollout_id, Turns.turn_id, Rollouts.opened_at)
        .join(Turns, Turns.seq == first)
        .where(
            Rollouts.opened_at >= since,
            has_tags(tags),
            ~exists().where(tag.rollout_id == Rollouts.rollout_id, tag.key == without),
            ~exists().where(RolloutPlaces.rollout_id == Rollouts.rollout_id),
            ~exists().where(names.key == named_by, names.value == Rollouts.rollout_id),
        )
        .order_by(Rollouts.opened_at.desc(), Rollouts.rollout_id)
        .limit(limit)
    )
    return [FirstTurn(*row) for row in connection.execute(query).tuples()]
