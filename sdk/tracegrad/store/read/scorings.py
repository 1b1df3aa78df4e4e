"""Which rollouts wait for scorers, and how scorers ended with those that did not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, func, or_, select

from tracegrad.store.expressions import (
    SCORED_OUTCOMES,
    has_turns,
    is_last_scoring,
    is_rewardable,
)
from tracegrad.store.models import Rewards, Rollouts, Scorings, Turns
from tracegrad.store.rows import rows_of_keys, select_fields
from tracegrad.store.types import COMPOSED_SOURCE, Scoring

# PostgreSQL numbers rewards before they are committed: one may be seen after so many later ones.
COMMITTED_LATER = 1_000
# Of scorings that failed, so many kinds of errors are told apart.
MOST_FAILURES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringCandidate:
    """A rollout that scorers may have something to say of, or whose sum may have changed.

    `is_finished`: it ended with an outcome that is scored. `newest_reward` (but for
    composed ones) and `newest_scoring` are numbers of arrival: where none of these fields changed,
    there is nothing to do."""

    rollout_id: str
    task_id: str | None
    finished_at: float | None
    is_finished: bool
    is_consumed: bool
    turns: int
    newest_reward: int | None
    newest_scoring: int | None


@dataclass(frozen=True, slots=True)
class ScoringFailure:
    """So many rollouts failed with this error of this scorer."""

    scorer: str
    error: str
    rollouts: int


@dataclass(frozen=True, slots=True)
class ScorerCounts:
    """Scorings of a scorer, and the seconds that they took together."""

    scored: int
    unknown: int
    failed: int
    seconds: float


def scoring_candidates(
    connection: Connection,
    tags: Mapping[str, str],
    *,
    rewards_after: int,
    rollout_ids: Collection[str] | None = None,
    held_out: Mapping[str, str] | None = None,
) -> list[ScoringCandidate]:
    """The oldest first, as `is_rewardable` has it: rollouts with turns that ended and that no
    training took; open ones that have a composed reward from an earlier end; and those that
    training took and that were given a reward, with a number above `rewards_after`, since their
    last one was composed. `rollout_ids`: of these alone."""
    finished = and_(Rollouts.finished_at.is_not(None), Rollouts.outcome.in_(SCORED_OUTCOMES))
    given, composed = (
        select(func.max(Rewards.seq))
        .where(Rewards.rollout_id == Rollouts.rollout_id, by)
        .correlate(Rollouts)
        .scalar_subquery()
        for by in (Rewards.source != COMPOSED_SOURCE, Rewards.source == COMPOSED_SOURCE)
    )
    is_consumed = Rollouts.consumed_at.is_not(None)
    rewarded = Rollouts.rollout_id.in_(
        select(Rewards.rollout_id).where(Rewards.seq > rewards_after)
    )
    turns = select(func.count()).where(Turns.rollout_id == Rollouts.rollout_id)
    newest = select(func.max(Scorings.seq)).where(Scorings.rollout_id == Rollouts.rollout_id)
    query = (
        select(
            Rollouts.rollout_id,
            Rollouts.task_id,
            Rollouts.finished_at,
            finished.label("is_finished"),
            is_consumed.label("is_consumed"),
            turns.correlate(Rollouts).scalar_subquery().label("turns"),
            given.label("newest_reward"),
            newest.correlate(Rollouts).scalar_subquery().label("newest_scoring"),
        )
        .where(
            is_rewardable(tags, held_out),
            or_(
                and_(~is_consumed, finished, has_turns()),
                and_(~is_consumed, Rollouts.finished_at.is_(None), composed.is_not(None)),
                and_(is_consumed, rewarded, given > composed),
            ),
        )
        .order_by(Rollouts.finished_at, Rollouts.rollout_id)
    )
    if rollout_ids is None:
        rows = connection.execute(query).all()
    else:
        rows = list(rows_of_keys(connection, query, Rollouts.rollout_id, rollout_ids))
    return [
        ScoringCandidate(
            **{
                **row._mapping,
                "is_finished": bool(row.is_finished),
                "is_consumed": bool(row.is_consumed),
            }
        )
        for row in rows
    ]


def newest_reward_of_all(connection: Connection) -> int:
    """Its number of arrival; 0: there is none."""
    return connection.scalar(select(func.max(Rewards.seq))) or 0


def load_scorings(connection: Connection, rollout_ids: Collection[str]) -> dict[str, list[Scoring]]:
    """In order, by rollout."""
    found: dict[str, list[Scoring]] = {rollout_id: [] for rollout_id in rollout_ids}
    query = select_fields(Scoring, Scorings).order_by(Scorings.seq)
    for row in rows_of_keys(connection, query, Scorings.rollout_id, rollout_ids):
        found[row.rollout_id].append(Scoring(**row._mapping))
    return found


def scoring_failures(connection: Connection, which: ColumnElement[bool]) -> list[ScoringFailure]:
    """Of the rollouts for which `which` holds, the most frequent first."""
    count = func.count()
    query = (
        select(Scorings.scorer, func.coalesce(Scorings.error, "").label("error"), count.label("n"))
        .join(Rollouts, Rollouts.rollout_id == Scorings.rollout_id)
        .where(Scorings.state == "failed", is_last_scoring(), which)
        .group_by(Scorings.scorer, Scorings.error)
        .order_by(count.desc(), Scorings.scorer, Scorings.error)
        .limit(MOST_FAILURES)
    )
    return [ScoringFailure(row.scorer, row.error, row.n) for row in connection.execute(query)]


def count_scorings(
    connection: Connection, *, after: int = 0
) -> tuple[dict[str, ScorerCounts], int]:
    """By scorer, of those with a number of arrival above `after`; and the newest number."""
    query = (
        select(
            Scorings.scorer,
            Scorings.state,
            func.count().label("n"),
            func.sum(Scorings.seconds).label("seconds"),
            func.max(Scorings.seq).label("last"),
        )
        .where(Scorings.seq > after)
        .group_by(Scorings.scorer, Scorings.state)
    )
    found: dict[str, dict[str, float]] = {}
    last = after
    for row in connection.execute(query):
        counts = found.setdefault(row.scorer, {"seconds": 0.0})
        counts[row.state] = row.n
        counts["seconds"] += row.seconds
        last = max(last, row.last)
    made = {
        name: ScorerCounts(
            int(counts.get("scored", 0)),
            int(counts.get("unknown", 0)),
            int(counts.get("failed", 0)),
            counts["seconds"],
        )
        for name, counts in sorted(found.items())
    }
    return made, last
