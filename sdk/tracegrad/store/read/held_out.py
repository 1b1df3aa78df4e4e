"""Rollouts that a candidate is judged by, and the versions that sampled them: held-out ones, or
those of a share of traffic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, exists, select

from tracegrad.store.expressions import (
    SCORED_OUTCOMES,
    is_held_out,
    is_selected,
    latest_reward,
)
from tracegrad.store.models import Rollouts, Turns
from tracegrad.store.rows import rows_of_keys


@dataclass(frozen=True, slots=True)
class EvaluatedRollout:
    """A finished one with a reward. `versions`: all that sampled tokens of it."""

    rollout_id: str
    finished_at: float
    reward: float
    versions: frozenset[int]


def held_out_rollouts(
    connection: Connection,
    tags: Mapping[str, str],
    versions: Collection[int],
    *,
    composed: bool = False,
) -> list[EvaluatedRollout]:
    """Those that are marked as held out or carry all `tags`, and of which one of `versions` sampled
    a turn's last token; by their end. `composed`: as `latest_reward` has it."""
    return _rollouts(connection, is_held_out(tags), versions, composed=composed)


def traffic_rollouts(
    connection: Connection,
    tags: Mapping[str, str],
    versions: Collection[int],
    *,
    composed: bool = False,
) -> list[EvaluatedRollout]:
    """As `held_out_rollouts`, of all others that training may take by `tags`."""
    return _rollouts(connection, is_selected(tags), versions, composed=composed)


def _rollouts(
    connection: Connection,
    which: ColumnElement[bool],
    versions: Collection[int],
    *,
    composed: bool = False,
) -> list[EvaluatedRollout]:
    reward = latest_reward(composed=composed)
    sampled = exists().where(
        Turns.rollout_id == Rollouts.rollout_id, Turns.last_version.in_(list(versions))
    )
    query = (
        select(Rollouts.rollout_id, Rollouts.finished_at, reward)
        .where(
            Rollouts.finished_at.is_not(None),
            Rollouts.outcome.in_(SCORED_OUTCOMES),
            reward.is_not(None),
            which,
            sampled,
        )
        .order_by(Rollouts.finished_at, Rollouts.rollout_id)
    )
    found = connection.execute(query).all()
    spans: defaultdict[str, set[int]] = defaultdict(set)
    turns = select(Turns.rollout_id, Turns.policy_versions)
    keys = [rollout_id for rollout_id, _, _ in found]
    for rollout_id, counted in rows_of_keys(connection, turns, Turns.rollout_id, keys):
        spans[rollout_id].update(version for version, _ in counted)
    return [
        EvaluatedRollout(rollout_id, finished_at, reward, frozenset(spans[rollout_id]))
        for rollout_id, finished_at, reward in found
        if finished_at is not None and reward is not None
    ]
