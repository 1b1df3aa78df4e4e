"""Rollouts as attempts at their tasks: how each ended, and which version made it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, func, literal, select
from sqlalchemy.orm import InstrumentedAttribute, aliased

from tracegrad.store.expressions import SCORED_OUTCOMES, has_turns, latest_reward
from tracegrad.store.filters import RolloutFilter
from tracegrad.store.models import Rollouts, RolloutTags, Turns
from tracegrad.store.rows import rows_of_keys

_AT_ONCE = 2_000  # rows in memory


@dataclass(frozen=True, slots=True)
class Attempt:
    """`reward` None: nobody said. `version`: the newest policy version that sampled any turn's last
    token; None: none is known. `tag`: the value of the tag that was asked for."""

    rollout_id: str
    task_id: str | None
    agent: str | None
    reward: float | None
    version: int | None
    completion_tokens: int
    tag: str | None


def iterate_attempts(
    connection: Connection, wanted: RolloutFilter, *, tag: str | None = None
) -> Iterator[Attempt]:
    """Those with turns that ended and say something of the policy, the oldest first."""
    tags = aliased(RolloutTags)  # `wanted` may ask for tags, too
    query = _attempts(literal(None) if tag is None else tags.value).where(wanted.where())
    if tag is not None:
        of_tag = and_(tags.rollout_id == Rollouts.rollout_id, tags.key == tag)
        query = query.outerjoin(tags, of_tag)
    yield from _read(connection.execution_options(yield_per=_AT_ONCE).execute(query))


def load_attempts(connection: Connection, rollout_ids: Sequence[str]) -> list[Attempt]:
    """Of these rollouts those that `iterate_attempts` has, in no order."""
    return [
        *_read(rows_of_keys(connection, _attempts(literal(None)), Rollouts.rollout_id, rollout_ids))
    ]


def _attempts(
    tag: ColumnElement[str | None] | InstrumentedAttribute[str],
) -> Select[*tuple[Any, ...]]:
    """Those that ended and say something of the policy, the oldest first."""
    per_rollout = Turns.rollout_id == Rollouts.rollout_id
    return (
        select(
            Rollouts.rollout_id,
            Rollouts.task_id,
            Rollouts.agent,
            latest_reward(),
            select(func.max(Turns.last_version)).where(per_rollout).scalar_subquery(),
            select(func.coalesce(func.sum(Turns.completion_tokens), 0))
            .where(per_rollout)
            .scalar_subquery(),
            tag,
        )
        .where(Rollouts.outcome.in_(SCORED_OUTCOMES), has_turns())
        .order_by(Rollouts.opened_at, Rollouts.rollout_id)
    )


def _read(rows: Iterable[Row[*tuple[Any, ...]]]) -> Iterator[Attempt]:
    for rollout_id, task_id, agent, reward, version, tokens, value in rows:
        # PostgreSQL's sum is a decimal.
        yield Attempt(rollout_id, task_id, agent, reward, version, int(tokens), value)
