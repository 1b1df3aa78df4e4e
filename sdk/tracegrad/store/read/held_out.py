"""Held-out rollouts, by the versions that sampled them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, exists, select

from tracegrad.store.expressions import SCORED_OUTCOMES, has_tags, latest_reward
from tracegrad.store.models import Rollouts, Turns
from tracegrad.store.rows import rows_of_keys


@dataclass(frozen=True, slots=True)
class HeldOutRollout:
    """A finished one with a reward. `versions`: all that sampled tokens of it."""

    rollout_id: str
    finished_at: float
    reward: float
    versions: frozenset[int]


def held_out_rollouts(
    connection: Connection, tags: Mapping[str, str], versions: Collection[int]
) -> list[HeldOutRollout]:
    """Those with all `tags` that one of `versions` sampled a turn's last token of, by their end."""
    sampled = exists().where(
        Turns.rollout_id == Rollouts.rollout_id, Turns.last_version.in_(list(versions))
    )
    query = (
        select(Rollouts.rollout_id, Rollouts.finished_at, latest_reward())
        .where(
            Rollouts.finished_at.is_not(None),
            Rollouts.outcome.in_(SCORED_OUTCOMES),
            latest_reward().is_not(None),
            has_tags(tags),
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
        HeldOutRollout(rollout_id, finished_at, reward, frozenset(spans[rollout_id]))
        for rollout_id, finished_at, reward in found
        if finished_at is not None and reward is not None
    ]
