"""Rollouts that a candidate is judged by, and the versions that sampled them: held-out ones, or
those of a share of traffic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, case, exists, literal, null, or_, select

from tracegrad.store.expressions import (
    SCORED_OUTCOMES,
    has_failed_scoring,
    has_turns,
    is_held_out,
    is_selected,
    latest_reward,
)
from tracegrad.store.models import Rollouts, RolloutTags, Scorings, Turns
from tracegrad.store.rows import rows_of_keys

# Of rollouts that were made to evaluate a version: its number.
VERSION_TAG = "evaluated_version"


@dataclass(frozen=True, slots=True)
class EvaluatedRollout:
    """A finished one. `versions`: all that sampled tokens of it, or the one that it was made to
    evaluate, where it has no turn. `reward` None: it has none; `lacks` then says why it will get
    none, or is None while one may come."""

    rollout_id: str
    finished_at: float
    reward: float | None
    versions: frozenset[int]
    lacks: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardWait:
    """How long a reward may take: until all of `scorers` have ended with the rollout, and
    `no_reward_before`, in seconds since the epoch, is later than its end."""

    scorers: Collection[str] = ()
    no_reward_before: float


def held_out_rollouts(
    connection: Connection,
    tags: Mapping[str, str],
    versions: Collection[int],
    *,
    composed: bool = False,
    wait: RewardWait | None = None,
) -> list[EvaluatedRollout]:
    """Those that are marked as held out or carry all `tags`, and of which one of `versions` sampled
    a turn's last token, or for one of which they were made (`VERSION_TAG`); by their end.
    `composed`: as `latest_reward` has it. `wait` None: a reward may always
    come, unless a scorer failed for good, or what failed was not the policy."""
    return _rollouts(connection, is_held_out(tags), versions, composed=composed, wait=wait)


def traffic_rollouts(
    connection: Connection,
    tags: Mapping[str, str],
    versions: Collection[int],
    *,
    composed: bool = False,
) -> list[EvaluatedRollout]:
    """As `held_out_rollouts`, of all others that training may take by `tags`, without those for
    whose reward somebody still waits: of traffic that may be most."""
    return _rollouts(connection, is_selected(tags), versions, composed=composed, decided=True)


def _rollouts(
    connection: Connection,
    which: ColumnElement[bool],
    versions: Collection[int],
    *,
    composed: bool = False,
    wait: RewardWait | None = None,
    decided: bool = False,
) -> list[EvaluatedRollout]:
    """`decided`: only those that have a reward, or will get none."""
    reward = latest_reward(composed=composed)
    lacks = _lacks(reward, wait)
    sampled = exists().where(
        Turns.rollout_id == Rollouts.rollout_id, Turns.last_version.in_(list(versions))
    )
    made_for = _made_for(versions)
    query = (
        select(Rollouts.rollout_id, Rollouts.finished_at, reward, lacks, made_for)
        .where(
            Rollouts.finished_at.is_not(None),
            which,
            or_(sampled, and_(made_for.is_not(None), ~has_turns())),
        )
        .order_by(Rollouts.finished_at, Rollouts.rollout_id)
    )
    if decided:
        query = query.where(or_(reward.is_not(None), lacks.is_not(None)))
    found = connection.execute(query).all()
    spans: defaultdict[str, set[int]] = defaultdict(set)
    turns = select(Turns.rollout_id, Turns.policy_versions)
    keys = [row[0] for row in found]
    for rollout_id, counted in rows_of_keys(connection, turns, Turns.rollout_id, keys):
        spans[rollout_id].update(version for version, _ in counted)
    return [
        EvaluatedRollout(
            rollout_id,
            finished_at,
            value if why is None else None,
            frozenset(spans[rollout_id] or ({int(made)} if made is not None else ())),
            why,
        )
        for rollout_id, finished_at, value, why, made in found
        if finished_at is not None
    ]


def _lacks(
    reward: ColumnElement[float | None], wait: RewardWait | None
) -> ColumnElement[str | None]:
    """Of finished `Rollouts`: why one has no reward and will get none; NULL: it has, or may."""
    reasons = [
        (Rollouts.outcome.not_in(SCORED_OUTCOMES), Rollouts.outcome),
        (~has_turns(), literal("no_turns")),
        (reward.is_not(None), null()),
        (has_failed_scoring(), literal("scoring_failed")),
    ]
    if wait is not None:
        ended = [
            exists()
            .where(Scorings.rollout_id == Rollouts.rollout_id, Scorings.scorer == scorer)
            .correlate(Rollouts)
            for scorer in wait.scorers
        ]
        late = Rollouts.finished_at < wait.no_reward_before
        reasons.append((and_(late, *ended), literal("no_reward")))
    return case(*reasons, else_=null())


def _made_for(versions: Collection[int]) -> ColumnElement[str | None]:
    """Which of `versions` the rollout was made to evaluate; NULL: none."""
    return (
        select(RolloutTags.value)
        .where(
            RolloutTags.rollout_id == Rollouts.rollout_id,
            RolloutTags.key == VERSION_TAG,
            RolloutTags.value.in_([str(version) for version in versions]),
        )
        .correlate(Rollouts)
        .scalar_subquery()
    )
