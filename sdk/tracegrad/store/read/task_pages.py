"""Pages of tasks by key, the task with the newest rollout first, and figures of those on a page.

What is shown of a task is of its newest attempts, which an index has in their order: a task may
have most of a million rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from time import monotonic
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Select,
    and_,
    bindparam,
    case,
    func,
    or_,
    select,
)
from sqlalchemy.orm import aliased

from tracegrad.events import Json
from tracegrad.store.encoding.shared_texts import load_shared_texts, unpack_turn_content
from tracegrad.store.expressions import SCORED_OUTCOMES, has_turns, latest_reward
from tracegrad.store.filters import OPEN
from tracegrad.store.models import Rollouts, Turns
from tracegrad.store.read.rollout_pages import (
    SEARCH_S,
    RolloutKey,
    find_rollouts,
    newest_first,
)
from tracegrad.store.read.rollouts import TaskSummary
from tracegrad.store.read.task_health import (
    DEFAULT_RULE,
    QuarantineRule,
    Subject,
    SubjectHealth,
    subject_health,
)
from tracegrad.store.rows import rows_of_keys

# What a page looks for its tasks; their figures take as long again.
_SEARCH_S = SEARCH_S / 2
# More attempts of a task are not counted.
MOST_COUNTED = 10_000
# Attempts that are looked at for its state: some of the newest did not end, or were aborted.
_LOOKED_AT = 2 * DEFAULT_RULE.looked_at


@dataclass(frozen=True, slots=True)
class TaskPage:
    """`keys`: the newest rollout of each task, the newest first, and `task_ids` theirs. `more` and
    `searched_to` as of `RolloutPage`."""

    task_ids: list[str]
    keys: list[RolloutKey]
    more: bool
    searched_to: float | None = None


@dataclass(frozen=True, slots=True)
class AttemptCount:
    """`more`: there are others, which were not counted."""

    attempts: int
    more: bool


def page_of_tasks(
    connection: Connection,
    *,
    before: RolloutKey | None = None,
    limit: int,
    search_s: float = _SEARCH_S,
    clock: Callable[[], float] = monotonic,
) -> TaskPage:
    """Those whose newest rollout is behind `before`, at most `limit`. Rollouts without a task are
    no task."""
    keys, searched_to = find_rollouts(
        connection,
        _is_newest_of_task(),
        before=before,
        limit=limit + 1,
        search_s=search_s,
        clock=clock,
    )
    query = select(Rollouts.rollout_id, Rollouts.task_id)
    ids = [key.rollout_id for key in keys[:limit]]
    tasks = {
        name: str(task) for name, task in rows_of_keys(connection, query, Rollouts.rollout_id, ids)
    }
    more = len(keys) > limit or searched_to is not None
    return TaskPage([tasks[name] for name in ids], keys[:limit], more, searched_to)


def _is_newest_of_task() -> ColumnElement[bool]:
    """Of `Rollouts`. One look into the index of tasks for each."""
    other = aliased(Rollouts)
    later = or_(
        other.opened_at > Rollouts.opened_at,
        and_(other.opened_at == Rollouts.opened_at, other.rollout_id > Rollouts.rollout_id),
    )
    newer = select(other.rollout_id).where(
        other.task_id == Rollouts.task_id, other.opened_at >= Rollouts.opened_at, later
    )
    # Rollouts are gone through by their moments: the index of tasks is of no use for this.
    has_task = Rollouts.task_id.concat("").is_not(None)
    return and_(has_task, ~newer.correlate(Rollouts).exists())


def newest_rollouts(connection: Connection, task_id: str, limit: int) -> list[RolloutKey]:
    """Of a task, the newest first."""
    query = select(Rollouts.opened_at, Rollouts.rollout_id)
    rows = connection.execute(_newest(query, task_id, limit))
    return [RolloutKey(*row) for row in rows]


def _newest(query: Select[*tuple[Any, ...]], task_id: str, limit: int) -> Select[*tuple[Any, ...]]:
    return query.where(Rollouts.task_id == task_id).order_by(*newest_first()).limit(limit)


def rollout_input(connection: Connection, rollout_id: str) -> Any:
    """As it was given, less what was redacted; None: there is none."""
    return connection.scalar(select(Rollouts.task).where(Rollouts.rollout_id == rollout_id))


def count_attempts(connection: Connection, task_id: str) -> AttemptCount:
    asked = {"task_id": task_id, "most": MOST_COUNTED + 1}
    count = connection.scalar(_count_query(), asked) or 0
    return AttemptCount(min(count, MOST_COUNTED), count > MOST_COUNTED)


# A page asks these of each of its tasks: to put one together takes longer than the database does.
@cache
def _count_query() -> Select[int]:
    some = select(Rollouts.rollout_id).where(Rollouts.task_id == bindparam("task_id"))
    most = bindparam("most", type_=Integer())
    return select(func.count()).select_from(some.limit(most).subquery())


@cache
def _summary_query() -> Select[*tuple[Any, ...]]:
    says = and_(Rollouts.outcome.in_(SCORED_OUTCOMES), has_turns())
    query = select(
        Rollouts.opened_at, Rollouts.rollout_id, Rollouts.outcome, case((says, latest_reward()))
    )
    of_task = query.where(Rollouts.task_id == bindparam("task_id"))
    return of_task.order_by(*newest_first()).limit(bindparam("most", type_=Integer()))


@cache
def _opening_query() -> Select[float]:
    """When the last attempt that is looked at was opened."""
    query = select(Rollouts.opened_at).where(Rollouts.task_id == bindparam("task_id"))
    behind = bindparam("behind", type_=Integer())
    return query.order_by(Rollouts.opened_at.desc()).offset(behind).limit(1)


def summarize_newest(connection: Connection, task_id: str, limit: int) -> TaskSummary | None:
    """Of a task's newest `limit` attempts; None: it has none. Rewards are those of attempts that
    say something of the policy, as pass@k counts them (`load_attempts`)."""
    rows = connection.execute(_summary_query(), {"task_id": task_id, "most": limit})
    found: TaskSummary | None = None
    for opened_at, rollout_id, outcome, reward in rows:
        found = found or TaskSummary(task_id, opened_at, rollout_id)
        found.outcomes[outcome or OPEN] += 1
        if reward is not None:
            found.rewards.append(reward)
    return found


def health_of_tasks(
    connection: Connection, task_ids: Sequence[str], rule: QuarantineRule = DEFAULT_RULE
) -> list[SubjectHealth]:
    """How each stands by its newest attempts, in their order."""
    opened_from: dict[str, float] = {}
    for task_id in task_ids:
        asked = {"task_id": task_id, "behind": _LOOKED_AT - 1}
        moment = connection.scalar(_opening_query(), asked)
        if moment is not None:
            opened_from[task_id] = moment
    subjects = [Subject("task", task_id) for task_id in task_ids]
    return subject_health(connection, subjects, rule, opened_from=opened_from)


def newest_versions(
    connection: Connection, rollout_ids: Collection[str]
) -> Mapping[str, int | None]:
    """The newest policy version that sampled any turn's last token, by rollout; those without a
    turn are left out."""
    query = select(Turns.rollout_id, func.max(Turns.last_version)).group_by(Turns.rollout_id)
    rows = rows_of_keys(connection, query, Turns.rollout_id, rollout_ids)
    return {row.rollout_id: row[1] for row in rows}


def last_responses(connection: Connection, rollout_ids: Collection[str]) -> dict[str, Json | None]:
    """What each rollout's last turn was answered with, by rollout; None: it is not stored. Those
    without a turn are left out."""
    last = select(func.max(Turns.seq)).group_by(Turns.rollout_id)
    numbers = [seq for (seq,) in rows_of_keys(connection, last, Turns.rollout_id, rollout_ids)]
    columns = (Turns.rollout_id, Turns.turn_id, Turns.request, Turns.response)
    rows: list[Any] = list(rows_of_keys(connection, select(*columns), Turns.seq, numbers))
    placed = load_shared_texts(connection, [row.turn_id for row in rows])
    return {row.rollout_id: unpack_turn_content(row, placed).response for row in rows}
