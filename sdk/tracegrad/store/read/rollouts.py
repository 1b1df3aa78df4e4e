"""Questions about what is stored, for the command line, the trainer's status and the proxy."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Select, case, func, select
from sqlalchemy.orm import InstrumentedAttribute

from tracegrad.events import Outcome, Reward, RolloutFinished, Span
from tracegrad.store.databases import statements
from tracegrad.store.errors import AmbiguousRollout, UnknownRollout
from tracegrad.store.expressions import (
    SCORED_OUTCOMES,
    begins_with,
    has_tags,
    latest_reward,
    newest_turn,
    training_state,
)
from tracegrad.store.filters import ALL, OPEN, RolloutFilter
from tracegrad.store.models import (
    Outcomes,
    Rewards,
    Rollouts,
    RolloutTags,
    Spans,
    Steps,
    TurnLedger,
    Turns,
    VersionEvents,
)
from tracegrad.store.read.call_counts import count_calls
from tracegrad.store.read.reward_arrival import late_reward_ids, reward_targets
from tracegrad.store.read.scorings import load_scorings
from tracegrad.store.read.turns import load_turns
from tracegrad.store.rows import count_rows, load, rows_of_keys, select_fields
from tracegrad.store.types import (
    PolicyVersion,
    RewardPoint,
    RolloutDetail,
    RolloutSummary,
    TurnCounts,
    TurnDisposition,
)

T = TypeVar("T")


class RolloutOrder(StrEnum):
    NEWEST = "newest"
    REWARD = "reward"
    TURNS = "turns"
    TOKENS = "tokens"


@dataclass(slots=True)
class TaskSummary:
    """What is known of its rollouts; `task_id` is None for those without a task."""

    task_id: str | None
    last_opened_at: float
    last_rollout_id: str
    outcomes: Counter[str] = field(default_factory=Counter)  # with "open"
    rewards: list[float] = field(default_factory=list)

    @property
    def rollouts(self) -> int:
        return self.outcomes.total()

    @property
    def mean(self) -> float | None:
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation of at least two. 0: comparing them teaches nothing."""
        if self.mean is None or len(self.rewards) < 2:
            return None
        squares = ((reward - self.mean) ** 2 for reward in self.rewards)
        return math.sqrt(math.fsum(squares) / len(self.rewards))


def list_rollouts(
    connection: Connection, wanted: RolloutFilter = ALL, *, limit: int | None = 50
) -> list[RolloutSummary]:
    """The newest first."""
    query = (
        _summary_query()
        .where(wanted.where())
        .order_by(Rollouts.opened_at.desc(), Rollouts.rollout_id.desc())
        .limit(limit)
    )
    return _summaries(connection, connection.execute(query))


def list_ordered(
    connection: Connection, wanted: RolloutFilter, order: RolloutOrder, limit: int
) -> list[RolloutSummary]:
    """At most `limit`: the newest, or those with the most of what `order` names, first."""
    if order is RolloutOrder.NEWEST:
        return list_rollouts(connection, wanted, limit=limit)
    # Their ids first: all else is asked for the few that are shown.
    query = (
        select(Rollouts.rollout_id)
        .where(wanted.where())
        # The databases disagree about where NULL sorts.
        .order_by(
            func.coalesce(_amount(order), _BELOW_EVERY_REWARD).desc(), Rollouts.opened_at.desc()
        )
        .limit(limit)
    )
    return load_summaries(connection, list(connection.scalars(query)))


def load_summaries(connection: Connection, ids: Sequence[str]) -> list[RolloutSummary]:
    """Of those rollouts that there are, in the order of their ids in `ids`."""
    found = _summaries(
        connection, rows_of_keys(connection, _summary_query(), Rollouts.rollout_id, ids)
    )
    by_id = {summary.rollout_id: summary for summary in found}
    return [by_id[rollout_id] for rollout_id in ids if rollout_id in by_id]


_BELOW_EVERY_REWARD = -1e308


def _amount(order: RolloutOrder) -> ColumnElement[Any]:
    if order is RolloutOrder.REWARD:
        return latest_reward()
    what = func.count() if order is RolloutOrder.TURNS else func.sum(Turns.completion_tokens)
    return select(what).where(Turns.rollout_id == Rollouts.rollout_id).scalar_subquery()


def summarize_tasks(
    connection: Connection, wanted: RolloutFilter, order: RolloutOrder
) -> list[TaskSummary]:
    """The task with the newest rollout first, or that with the highest mean reward."""
    query = (
        select(
            Rollouts.task_id,
            Rollouts.opened_at,
            Rollouts.rollout_id,
            Rollouts.outcome,
            latest_reward(),
        )
        .where(wanted.where())
        .order_by(Rollouts.opened_at.desc(), Rollouts.rollout_id.desc())
    )
    found: dict[str | None, TaskSummary] = {}
    for task_id, opened_at, rollout_id, outcome, reward in connection.execute(query):
        task = found.setdefault(task_id, TaskSummary(task_id, opened_at, rollout_id))
        task.outcomes[outcome or OPEN] += 1
        if reward is not None:
            task.rewards.append(reward)
    every = list(found.values())
    if order is RolloutOrder.REWARD:
        every.sort(key=lambda task: -math.inf if task.mean is None else task.mean, reverse=True)
    return every


def count_untrained(connection: Connection) -> tuple[int, int]:
    """Finished rollouts that training is not done with, and how many of them have a task."""
    query = select(func.count(), func.count(Rollouts.task_id)).where(
        Rollouts.finished_at.is_not(None), Rollouts.consumed_at.is_(None)
    )
    every, with_task = connection.execute(query).one()
    return every, with_task


def _summary_query() -> Select[*tuple[Any, ...]]:
    per_rollout = Turns.rollout_id == Rollouts.rollout_id
    return select_fields(RolloutSummary, Rollouts).add_columns(
        latest_reward().label("reward"),
        select(func.count()).where(per_rollout).scalar_subquery().label("turns"),
        select(func.coalesce(func.sum(Turns.completion_tokens), 0))
        .where(per_rollout)
        .scalar_subquery()
        .label("completion_tokens"),
        select(func.count())
        .where(per_rollout, TurnLedger.turn_id == Turns.turn_id, TurnLedger.step.is_not(None))
        .scalar_subquery()
        .label("trained_turns"),
        training_state({}, time.time()).label("state"),
        case((Rollouts.finished_at.is_(None), newest_turn())).label("last_turn_at"),
    )


def _summaries(
    connection: Connection, rows: Iterable[Row[*tuple[Any, ...]]]
) -> list[RolloutSummary]:
    found = [dict(row._mapping) for row in rows]
    tags = load_tags(connection, [row["rollout_id"] for row in found])
    for row in found:
        row["tags"] = tags[row["rollout_id"]]
        row["held_out"] = bool(row["held_out"])
        row["outcome"] = Outcome(row["outcome"]) if row["outcome"] else None
        row["completion_tokens"] = int(row["completion_tokens"])  # PostgreSQL's sum is a decimal
    return [RolloutSummary(**row) for row in found]


def load_tags(connection: Connection, rollout_ids: Sequence[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {rollout_id: {} for rollout_id in rollout_ids}
    query = select(RolloutTags.rollout_id, RolloutTags.key, RolloutTags.value).order_by(
        RolloutTags.rollout_id, RolloutTags.position
    )
    for rollout_id, key, value in rows_of_keys(
        connection, query, RolloutTags.rollout_id, rollout_ids
    ):
        found[rollout_id][key] = value
    return found


def resolve_rollout(connection: Connection, prefix: str) -> str:
    """The id itself, or the only one that begins with `prefix`."""
    exact = select(Rollouts.rollout_id).where(Rollouts.rollout_id == prefix)
    if (found := connection.scalar(exact)) is not None:
        return found
    if not prefix:
        raise UnknownRollout("an empty rollout id")
    query = (
        select(Rollouts.rollout_id)
        .where(begins_with(Rollouts.rollout_id, prefix))
        .order_by(Rollouts.rollout_id)
        .limit(4)
    )
    some = list(connection.scalars(query))
    if not some:
        raise UnknownRollout(f"no rollout {prefix}")
    if len(some) > 1:
        raise AmbiguousRollout(
            f"several rollouts begin with {prefix}: {', '.join(some[:3])}"
            + (", …" if len(some) > 3 else "")
        )
    return some[0]


def rollout_detail(connection: Connection, prefix: str) -> RolloutDetail:
    """By id or a prefix of it. Raises `UnknownRollout` or `AmbiguousRollout`."""
    detail = rollout_without_turns(connection, prefix)
    rollout_id = detail.summary.rollout_id
    detail.turns.extend(load_turns(connection, [rollout_id], expert_routing=False)[rollout_id])
    return detail


def rollout_without_turns(connection: Connection, prefix: str) -> RolloutDetail:
    """As `rollout_detail`, with no turns in it."""
    rollout_id = resolve_rollout(connection, prefix)
    query = _summary_query().where(Rollouts.rollout_id == rollout_id)
    [summary] = _summaries(connection, connection.execute(query))
    now = statements.server_time(connection)
    [target] = reward_targets(connection, [rollout_id], now)
    return RolloutDetail(
        summary=summary,
        task=connection.scalar(select(Rollouts.task).where(Rollouts.rollout_id == rollout_id)),
        turns=[],
        rewards=load_rewards(connection, [rollout_id])[rollout_id],
        spans=load_spans(connection, [rollout_id])[rollout_id],
        dispositions=load_dispositions(connection, [rollout_id])[rollout_id],
        unnamed_calls=count_calls(connection, [rollout_id])[0].unnamed_calls,
        rewards_taken=target.state != "open",
        late_rewards=late_reward_ids(connection, Rewards.rollout_id, [rollout_id], now),
        trainer_idle_s=_trainer_idle_s(connection),
        scorings=load_scorings(connection, [rollout_id])[rollout_id],
    )


def _trainer_idle_s(connection: Connection) -> float | None:
    last = connection.scalar(select(Steps.settings).order_by(Steps.step.desc()).limit(1))
    found = ((last or {}).get("data") or {}).get("idle_s")
    return float(found) if isinstance(found, int | float) else None


def load_dispositions(
    connection: Connection, rollout_ids: Sequence[str]
) -> dict[str, dict[str, TurnDisposition]]:
    """By turn id, in order of capture."""
    found: dict[str, dict[str, TurnDisposition]] = {rollout_id: {} for rollout_id in rollout_ids}
    query = (
        select_fields(TurnDisposition, TurnLedger)
        .add_columns(Turns.rollout_id, Turns.turn_id)
        .join(Turns, Turns.turn_id == TurnLedger.turn_id)
        .order_by(Turns.seq)
    )
    for *values, rollout_id, turn_id in rows_of_keys(
        connection, query, Turns.rollout_id, rollout_ids
    ):
        found[rollout_id][turn_id] = TurnDisposition(*values)
    return found


def load_rewards(
    connection: Connection,
    rollout_ids: Sequence[str],
    *,
    newest: Mapping[str, int] | None = None,
) -> dict[str, list[Reward]]:
    """Every reward event in order of arrival; of rollouts in `newest` those up to this number."""
    found: dict[str, list[Reward]] = {rollout_id: [] for rollout_id in rollout_ids}
    query = select_fields(Reward, Rewards).add_columns(Rewards.seq).order_by(Rewards.seq)
    for row in rows_of_keys(connection, query, Rewards.rollout_id, rollout_ids):
        values = dict(row._mapping)
        seq, rollout_id = values.pop("seq"), row.rollout_id
        if newest is None or seq <= newest.get(rollout_id, seq):
            found[rollout_id].append(Reward(**values))
    return found


def load_outcomes(
    connection: Connection, rollout_ids: Sequence[str]
) -> dict[str, list[RolloutFinished]]:
    """Every end in order of arrival."""
    found = _of_rollouts(connection, rollout_ids, RolloutFinished, Outcomes, Outcomes.seq)
    return {
        rollout_id: [replace(end, outcome=Outcome(end.outcome)) for end in ends]
        for rollout_id, ends in found.items()
    }


def load_spans(connection: Connection, rollout_ids: Sequence[str]) -> dict[str, list[Span]]:
    """By start."""
    order = (Spans.start_ns, Spans.trace_id, Spans.span_id)
    return _of_rollouts(connection, rollout_ids, Span, Spans, *order)


def rollouts_of_traces(connection: Connection, trace_ids: Collection[str]) -> list[tuple[str, str]]:
    """Trace and rollout of all that are known; a trace may have several."""
    known = select(Spans.trace_id, Spans.rollout_id).where(Spans.rollout_id.is_not(None)).distinct()
    rows = rows_of_keys(connection, known, Spans.trace_id, sorted(trace_ids))
    return [(trace_id, rollout_id) for trace_id, rollout_id in rows if rollout_id is not None]


def _of_rollouts(
    connection: Connection,
    rollout_ids: Sequence[str],
    kind: type[T],
    table: type[Outcomes | Spans],
    *order: InstrumentedAttribute[Any],
) -> dict[str, list[T]]:
    """A `kind` made of each of the table's rows, by rollout."""
    found: dict[str, list[T]] = {rollout_id: [] for rollout_id in rollout_ids}
    query = select_fields(kind, table).order_by(*order)
    for row in rows_of_keys(connection, query, table.rollout_id, rollout_ids):
        found[row.rollout_id].append(kind(**row._mapping))
    return found


def version_events(connection: Connection, version: int) -> list[PolicyVersion]:
    """All that became of it, in order."""
    query = select_fields(PolicyVersion, VersionEvents).order_by(VersionEvents.seq)
    return load(connection, PolicyVersion, query.where(VersionEvents.version == version))


def turn_counts(
    connection: Connection,
    tags: Mapping[str, str] | None = None,
    *,
    compared: bool = True,
    idle_before: float | None = None,
) -> TurnCounts:
    """How many turns were trained, skipped and why, and what the others wait for.

    With `tags`, turns of rollouts that do not carry them all wait as `not_selected`. `compared` and
    `idle_before` as `training_state` has them.
    """
    trained = connection.scalar(select(func.count(TurnLedger.step))) or 0
    reasons = (
        select(TurnLedger.skip_reason, func.count())
        .where(TurnLedger.step.is_(None))
        .group_by(TurnLedger.skip_reason)
    )
    skipped = {str(reason): count for reason, count in connection.execute(reasons)}
    # Turn by turn are looked at only those of rollouts that are not consumed: most are.
    waiting = (
        select(func.count())
        .select_from(Turns)
        .outerjoin(TurnLedger, TurnLedger.turn_id == Turns.turn_id)
        .where(Turns.rollout_id == Rollouts.rollout_id, TurnLedger.turn_id.is_(None))
        .correlate(Rollouts)
        .scalar_subquery()
    )
    states = (
        select(
            training_state(
                tags or {}, time.time(), compared=compared, idle_before=idle_before
            ).label("state"),
            waiting.label("turns"),
        )
        .where(Rollouts.consumed_at.is_(None))
        .subquery()
    )
    by_state = select(states.c.state, func.sum(states.c.turns)).group_by(states.c.state)
    pending = {state: int(turns) for state, turns in connection.execute(by_state) if turns}
    captured = count_rows(connection, Turns)
    # Captured after the ledger had closed their rollout: they will never be trained.
    if late := captured - trained - sum(skipped.values()) - sum(pending.values()):
        skipped["late"] = skipped.get("late", 0) + late
    return TurnCounts(captured, trained, skipped, pending)


def reward_curve(
    connection: Connection, tags: Mapping[str, str] | None = None, *, limit: int | None = None
) -> list[RewardPoint]:
    """One point a finished, scored, rewarded rollout with all `tags`, by time of finish; the last
    `limit` of them."""
    version = (
        select(func.max(Turns.last_version))
        .where(Turns.rollout_id == Rollouts.rollout_id)
        .scalar_subquery()
    )
    query = (
        select(Rollouts.finished_at, latest_reward(), version)
        .where(
            Rollouts.finished_at.is_not(None),
            Rollouts.outcome.in_(SCORED_OUTCOMES),
            latest_reward().is_not(None),
            has_tags(tags or {}),
        )
        .order_by(Rollouts.finished_at.desc(), Rollouts.rollout_id.desc())
        .limit(limit)
    )
    return [RewardPoint(*row) for row in connection.execute(query)][::-1]
