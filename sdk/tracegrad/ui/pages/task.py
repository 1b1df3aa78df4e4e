"""One task: what is asked, how it stands, how often attempts succeed by policy version, and
attempts side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from tracegrad.events import Json
from tracegrad.inspect.display_text import one_line
from tracegrad.inspect.pass_rates import PassRate, pass_rates, useful_ks
from tracegrad.inspect.transcript import Transcript
from tracegrad.jsonutil import text_or_json
from tracegrad.pass_at_k import SUCCESS
from tracegrad.store import Store
from tracegrad.store.read.attempts import load_attempts
from tracegrad.store.read.rollouts import load_summaries
from tracegrad.store.read.task_health import Subject, SubjectHealth, last_decisions
from tracegrad.store.read.task_pages import (
    AttemptCount,
    count_attempts,
    health_of_tasks,
    last_responses,
    newest_rollouts,
    newest_versions,
    rollout_input,
)
from tracegrad.store.read.task_titles import input_text, title_of_task
from tracegrad.store.types import RolloutSummary
from tracegrad.text_format import cut_text
from tracegrad.ui.pages.comparison import AttemptComparison, compare
from tracegrad.ui.pages.messages import SHORT, ShownText, shown_text
from tracegrad.ui.pages.rollouts import PATH as ROLLOUTS
from tracegrad.ui.pages.rollouts import path_of as path_of_rollout
from tracegrad.ui.pages.tasks import MOST_REASON, PATH, path_of
from tracegrad.ui.paging import NotThere, Query, WrongLink, link

# Attempts that rates are of, the newest; and that are listed.
RATED, LISTED = 500, 20
_MOST_VERSIONS = 20  # rows
_LAST_SAID = 160  # characters


class UnknownTask(NotThere):
    """Nothing is of this task. Says so."""


@dataclass(frozen=True, slots=True)
class VersionRates:
    """A row of the table. `version` None: of all attempts."""

    name: str
    rate: PassRate
    at: list[float | None]  # pass@k, of each k


@dataclass(frozen=True, slots=True)
class ListedAttempt:
    row: RolloutSummary
    version: int | None
    said: str  # the beginning of the last reply
    href: str
    is_compared: bool

    @property
    def outcome(self) -> str:
        return self.row.outcome.value if self.row.outcome is not None else "open"

    @property
    def took_s(self) -> float | None:
        if self.row.finished_at is None:
            return None
        return max(0.0, self.row.finished_at - self.row.opened_at)


@dataclass(frozen=True, slots=True)
class TaskView:
    """All that the page shows. `earlier_versions`: those before the ones that are listed."""

    task_id: str
    title: str
    asked: ShownText | None
    health: SubjectHealth
    count: AttemptCount
    rated: int
    ks: list[int]
    rates: list[VersionRates]
    earlier_versions: int
    attempts: list[ListedAttempt]
    comparison: AttemptComparison | None


def read_success(text: str | None) -> float:
    """The least reward of an attempt that succeeded. Raises WrongLink."""
    try:
        success = float(text) if text else SUCCESS
    except ValueError:
        success = math.nan
    if not math.isfinite(success):
        raise WrongLink(f"success: {(text or '')[:40]!r} is no number")
    return success


def task_view(
    store: Store, task_id: str, success: float, compared: Sequence[str], first_turn: int
) -> TaskView:
    """Raises UnknownTask, and for `compared` WrongLink or `UnknownRollout`."""
    with store.reading() as connection:
        newest = [key.rollout_id for key in newest_rollouts(connection, task_id, RATED)]
        subject = Subject("task", task_id)
        if not newest and subject not in last_decisions(connection, [subject]):
            raise UnknownTask(f"no rollout is of the task {task_id}")
        given = rollout_input(connection, newest[0]) if newest else None
        [health] = health_of_tasks(connection, [task_id])
        ks, rates, earlier = _rates(connection, newest, success)
        return TaskView(
            task_id=task_id,
            title=title_of_task(task_id, input_text(given)) or task_id,
            asked=None if given is None else shown_text(text_or_json(given), SHORT),
            health=health,
            count=count_attempts(connection, task_id),
            rated=len(newest),
            ks=ks,
            rates=rates,
            earlier_versions=earlier,
            attempts=_attempts(connection, newest[:LISTED], compared),
            comparison=compare(connection, task_id, compared, first_turn) if compared else None,
        )


def task_values(
    view: TaskView, success: float, query: Query, *, error: str | None = None
) -> dict[str, Any]:
    """What the template needs. `query`: of the link that led here."""
    here = path_of(view.task_id)
    kept = [(name, value) for name, value in query if name in ("task", "success", "compare")]
    return {
        "view": view,
        "path": here,
        "action": PATH,
        "rollouts": link(ROLLOUTS, [("task", view.task_id)]),
        "success": success,
        "given_success": dict(query).get("success", ""),
        "is_in_query": "?" in here,
        "earlier": _window_link(kept, here, view, -1),
        "later": _window_link(kept, here, view, 1),
        "error": error,
        "most_reason": MOST_REASON,
    }


def _window_link(query: Query, here: str, view: TaskView, way: int) -> str | None:
    """To the turns before, or behind, those that are compared."""
    shown = view.comparison
    if shown is None:
        return None
    turn = shown.first + way * len(shown.turns) if way > 0 else shown.earlier
    if turn is None or (way > 0 and turn >= shown.total):
        return None
    return link(here.partition("?")[0], query, turn=str(turn)) + "#compared"


def _rates(
    connection: Connection, rollout_ids: Sequence[str], success: float
) -> tuple[list[int], list[VersionRates], int]:
    """Of all, then by version, the newest first; and how many versions there are beyond."""
    attempts = load_attempts(connection, rollout_ids)
    whole = pass_rates(attempts, lambda _: "all", success=success).get("all", PassRate())
    by_version = pass_rates(attempts, lambda each: each.version, success=success)
    ks = useful_ks([whole], None)
    order = sorted(by_version, key=lambda v: (v is not None, v or 0), reverse=True)
    rows = [("all", whole)]
    rows += [(_version_text(version), by_version[version]) for version in order[:_MOST_VERSIONS]]
    found = [VersionRates(name, rate, [rate.at(k).value for k in ks]) for name, rate in rows]
    return ks, found, max(0, len(order) - _MOST_VERSIONS)


def _version_text(version: int | None) -> str:
    return "unknown" if version is None else str(version)


def _attempts(
    connection: Connection, rollout_ids: Sequence[str], compared: Sequence[str]
) -> list[ListedAttempt]:
    versions = newest_versions(connection, rollout_ids)
    responses = last_responses(connection, rollout_ids)
    return [
        ListedAttempt(
            row,
            versions.get(row.rollout_id),
            _said(responses.get(row.rollout_id)),
            path_of_rollout(row.rollout_id),
            row.rollout_id in compared,
        )
        for row in load_summaries(connection, rollout_ids)
    ]


def _said(response: Json | None) -> str:
    """The beginning of a reply; of one that is calls alone what it calls."""
    choices = (response or {}).get("choices") or ()
    raw = choices[0].get("message") if choices else None
    if not isinstance(raw, Mapping):
        return ""
    message = Transcript([]).message({**raw, "role": "reply"})
    calls = " ".join(f"→ {call.name} {call.arguments[:_LAST_SAID]}" for call in message.calls[:3])
    # More is cut before white space is looked at: it may be very long.
    text = message.text.strip()[: 4 * _LAST_SAID] or calls
    return cut_text(one_line(text), _LAST_SAID)
