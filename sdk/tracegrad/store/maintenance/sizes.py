"""How much room rollouts take, as far as the database's own counts give it cheaply.

Lengths of what is packed, which databases know without reading it, and for each row what its
small columns and its indexes take on average.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, String, cast, func, literal, select

from tracegrad.store.models import Rewards, Rollouts, Spans, Turns

# Bytes of a row besides what is packed, with its places in indexes: as measured on both databases.
_TURN, _SPAN, _ROLLOUT, _REWARD = 850, 350, 450, 200
_PACKED = (
    Turns.delta,
    Turns.completion,
    Turns.logprobs,
    Turns.request,
    Turns.response,
    Turns.request_marks,
    Turns.routed_experts,
)


def text_bytes() -> ColumnElement[int]:
    """Of one turn: what its request and response take."""
    return _length(Turns.request) + _length(Turns.response) + _length(Turns.request_marks)


def rollout_bytes() -> ColumnElement[int]:
    """Of one rollout, with all that belongs to it."""
    turns = _sum(sum(map(_length, _PACKED), literal(_TURN)), Turns)
    spans = _sum(_length(cast(Spans.attributes, String)) + _SPAN, Spans)
    rewards = select(func.count() * _REWARD).where(Rewards.rollout_id == Rollouts.rollout_id)
    task = _length(cast(Rollouts.task, String)) + _ROLLOUT
    return turns + spans + rewards.correlate(Rollouts).scalar_subquery() + task


def all_bytes(connection: Connection) -> int:
    """Of everything that is stored."""
    return int(connection.scalar(select(func.coalesce(func.sum(rollout_bytes()), 0))) or 0)


def _length(column: Any) -> ColumnElement[int]:
    return func.coalesce(func.length(column), 0)


def _sum(size: ColumnElement[int], table: type[Turns | Spans]) -> ColumnElement[int]:
    return (
        select(func.coalesce(func.sum(size), 0))
        .where(table.rollout_id == Rollouts.rollout_id)
        .correlate(Rollouts)
        .scalar_subquery()
    )
