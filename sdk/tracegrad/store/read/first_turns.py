"""The first turn of each rollout that was opened lately: where its conversation began."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, exists, func, or_, select
from sqlalchemy.orm import aliased

from tracegrad.store.expressions import has_tags, is_held_out
from tracegrad.store.models import RolloutPlaces, Rollouts, RolloutTags, Turns
from tracegrad.store.rows import rows_of_keys


@dataclass(frozen=True, slots=True)
class FirstTurn:
    rollout_id: str
    turn_id: str
    opened_at: float
    held_out: bool  # it is marked so
    agent_name: str | None  # as of `Turn`


def newest_first_turns(
    connection: Connection,
    *,
    tags: Mapping[str, str],
    without: str,
    named_by: str,
    since: float,
    unopened_before: float,
    limit: int,
) -> list[FirstTurn]:
    """Of rollouts with all `tags`, without any tag of the key `without`, whose id no other rollout
    has as its tag `named_by`; the newest `limit` that were opened at `since` or later, newest
    first. None that a driver had a place for, and of those that nobody opened (yet) only such of
    before `unopened_before`: a turn may be stored before the tags and the mark are."""
    tag, names = aliased(RolloutTags), aliased(RolloutTags)
    turns = aliased(Turns)
    first = (
        select(func.min(turns.seq))
        .where(turns.rollout_id == Rollouts.rollout_id)
        .correlate(Rollouts)
        .scalar_subquery()
    )
    query = (
        select(
            Rollouts.rollout_id,
            Turns.turn_id,
            Rollouts.opened_at,
            is_held_out(),
            Turns.agent_name,
        )
        .join(Turns, Turns.seq == first)
        .where(
            Rollouts.opened_at >= since,
            or_(Rollouts.opened, Rollouts.opened_at < unopened_before),
            has_tags(tags),
            ~exists().where(tag.rollout_id == Rollouts.rollout_id, tag.key == without),
            ~exists().where(RolloutPlaces.rollout_id == Rollouts.rollout_id),
            ~exists().where(names.key == named_by, names.value == Rollouts.rollout_id),
        )
        .order_by(Rollouts.opened_at.desc(), Rollouts.rollout_id)
        .limit(limit)
    )
    return [
        FirstTurn(rollout_id, turn_id, opened_at, bool(held_out), agent)
        for rollout_id, turn_id, opened_at, held_out, agent in connection.execute(query).tuples()
    ]


def first_turns_of(
    connection: Connection, rollout_ids: Collection[str], held_out: Mapping[str, str] | None
) -> dict[str, FirstTurn]:
    """By rollout, of those that have turns. `held_out`: tags of rollouts that are held out, besides
    those that are marked so."""
    inner = aliased(Turns)
    first = (
        select(func.min(inner.seq))
        .where(inner.rollout_id == Rollouts.rollout_id)
        .correlate(Rollouts)
        .scalar_subquery()
    )
    mark = is_held_out(held_out).label("held_out")
    columns = (Rollouts.rollout_id, Turns.turn_id, Rollouts.opened_at, mark, Turns.agent_name)
    query = select(*columns).join(Turns, Turns.seq == first)
    rows = rows_of_keys(connection, query, Rollouts.rollout_id, rollout_ids)
    return {
        row.rollout_id: FirstTurn(
            row.rollout_id, row.turn_id, row.opened_at, bool(row.held_out), row.agent_name
        )
        for row in rows
    }
