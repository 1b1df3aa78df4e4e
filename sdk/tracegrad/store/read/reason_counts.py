"""Why turns were not trained and why trees forked, counted over many rollouts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Select, Subquery, and_, case, func, literal, select

from tracegrad.store.expressions import training_state
from tracegrad.store.filters import RolloutFilter
from tracegrad.store.models import Rollouts, TurnLedger, Turns
from tracegrad.store.rows import count_rows
from tracegrad.store.types import LATE, PENDING_STATES


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """`example`: the newest rollout that has such turns. `final`: they will never be trained
    (of a fork: true)."""

    reason: str
    final: bool
    turns: int
    rollouts: int
    example: str


@dataclass(frozen=True, slots=True)
class ReasonCounts:
    """`turns == trained + sum of the turns of not_trained`."""

    rollouts: int
    turns: int
    trained: int
    not_trained: list[ReasonCount]  # the most frequent first, like `forks`
    forks: list[ReasonCount]


def count_reasons(connection: Connection, wanted: RolloutFilter) -> ReasonCounts:
    turns = connection.execute(_not_trained_query(wanted)).all()
    forks = connection.execute(_forks_query(wanted)).all()
    not_trained = [_counted(row) for row in turns if row.reason is not None]
    not_trained += _without_turns(connection, wanted)
    return ReasonCounts(
        rollouts=count_rows(connection, Rollouts, wanted.where()),
        turns=sum(row.turns for row in turns),
        trained=sum(row.turns for row in turns if row.reason is None),
        not_trained=_most_first(not_trained),
        forks=_most_first([_counted(row) for row in forks]),
    )


def _without_turns(connection: Connection, wanted: RolloutFilter) -> list[ReasonCount]:
    """Rollouts that no group counts, since nothing was recorded of them."""
    state = training_state({}, time.time())
    query = select(func.count(), func.max(Rollouts.rollout_id))
    count, example = connection.execute(query.where(wanted.where(), state == "no_turns")).one()
    return [ReasonCount("no_turns", False, 0, count, example)] if count else []


def _forks_query(wanted: RolloutFilter) -> Select[Any]:
    query = select(
        Turns.rollout_id, Turns.fork_reason.label("reason"), literal(1).label("final")
    ).where(Turns.fork_reason.is_not(None))
    if not wanted.matches_all:
        query = query.join(Rollouts, Rollouts.rollout_id == Turns.rollout_id).where(wanted.where())
    return _counting(query.subquery())


def _not_trained_query(wanted: RolloutFilter) -> Select[Any]:
    """As `inspect.reasons.untrained_reason` has it for one turn; without a reason: it was
    trained."""
    # Once for each rollout: a turn only looks up the state of its rollout.
    states = (
        select(Rollouts.rollout_id, training_state({}, time.time()).label("state"))
        .where(wanted.where())
        .cte("states")
    )
    reason = case(
        (TurnLedger.turn_id.is_not(None), TurnLedger.skip_reason),
        (Turns.untrainable.is_not(None), Turns.untrainable),
        (states.c.state == "consumed", LATE),
        else_=states.c.state,
    )
    undecided = and_(TurnLedger.turn_id.is_(None), Turns.untrainable.is_(None))
    waits = and_(undecided, states.c.state.in_(PENDING_STATES))
    final = case((waits, 0), else_=1)
    return _counting(
        select(Turns.rollout_id, reason.label("reason"), final.label("final"))
        .join(states, states.c.rollout_id == Turns.rollout_id)
        .outerjoin(TurnLedger, TurnLedger.turn_id == Turns.turn_id)
        .subquery()
    )


def _counting(turns: Subquery) -> Select[Any]:
    return select(
        turns.c.reason,
        turns.c.final,
        func.count().label("turns"),
        func.count(turns.c.rollout_id.distinct()).label("rollouts"),
        func.max(turns.c.rollout_id).label("example"),
    ).group_by(turns.c.reason, turns.c.final)


def _counted(row: Row[Any]) -> ReasonCount:
    return ReasonCount(row.reason, bool(row.final), row.turns, row.rollouts, row.example)


def _most_first(found: list[ReasonCount]) -> list[ReasonCount]:
    return sorted(found, key=lambda each: (-each.turns, each.reason))
