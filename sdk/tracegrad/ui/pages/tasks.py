"""The list of tasks: those that are set aside, then pages of all by their newest rollout; and what
people decide about them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote, urlencode

from tracegrad.pass_at_k import SUCCESS
from tracegrad.store import Store
from tracegrad.store.ledger.quarantine import decide
from tracegrad.store.read.rollout_pages import RolloutKey
from tracegrad.store.read.rollouts import TaskSummary
from tracegrad.store.read.task_health import (
    Subject,
    SubjectHealth,
    SubjectKind,
    TaskDecision,
    last_decisions,
    quarantined,
)
from tracegrad.store.read.task_pages import (
    AttemptCount,
    count_attempts,
    health_of_tasks,
    newest_rollouts,
    page_of_tasks,
    summarize_newest,
)
from tracegrad.store.read.task_titles import load_inputs, title_of_task
from tracegrad.ui.paging import WrongLink, link, read_key, write_key
from tracegrad.ui.security import BASE

PATH = f"{BASE}/tasks"
PAGE = 20  # rows
# Attempts of each, the newest, that its figures are of.
LOOKED_AT = 50
# Of more that are set aside the latest are shown.
MOST_ASIDE = 50
MOST_REASON = 2_000  # characters


def path_of(task_id: str) -> str:
    """Where a task is shown. Browsers take dots for folders, and routes end at a line's end."""
    if task_id.strip(".") == "" or "\n" in task_id:
        return f"{PATH}?{urlencode({'task': task_id})}"
    return f"{PATH}/{quote(task_id, safe='')}"


@dataclass(frozen=True, slots=True)
class ListedTask:
    """A row of the table. `summary` is of the newest attempts."""

    task_id: str
    title: str
    href: str
    count: AttemptCount
    summary: TaskSummary
    health: SubjectHealth

    @property
    def outcomes(self) -> list[tuple[str, int]]:
        """The most frequent first."""
        return sorted(self.summary.outcomes.items(), key=lambda each: (-each[1], each[0]))

    @property
    def pass_rate(self) -> float | None:
        rewards = self.summary.rewards
        return sum(one >= SUCCESS for one in rewards) / len(rewards) if rewards else None


@dataclass(frozen=True, slots=True)
class SetAside:
    """A task or an image that is quarantined. `href`: an image has no page."""

    subject: Subject
    title: str
    href: str | None
    decision: TaskDecision


def list_values(store: Store, before: str | None, *, error: str | None = None) -> dict[str, Any]:
    """What the template needs. WrongLink: `before` is no key."""
    key = read_key(before) if before else None
    with store.reading() as connection:
        page = page_of_tasks(connection, before=key, limit=PAGE)
        asked = load_inputs(connection, [each.rollout_id for each in page.keys])
        health = health_of_tasks(connection, page.task_ids)
        rows = [
            ListedTask(
                task_id,
                title_of_task(task_id, asked.get(newest.rollout_id)) or task_id,
                path_of(task_id),
                count_attempts(connection, task_id),
                summarize_newest(connection, task_id, LOOKED_AT)
                or TaskSummary(task_id, newest.opened_at, newest.rollout_id),
                one,
            )
            for task_id, newest, one in zip(page.task_ids, page.keys, health, strict=True)
        ]
        aside, more_aside = _aside(store) if key is None else ([], 0)
    return {
        "rows": rows,
        "aside": aside,
        "more_aside": more_aside,
        "looked_at": LOOKED_AT,
        "is_cut": any(row.count.attempts > LOOKED_AT for row in rows),
        "success": SUCCESS,
        "first_page": key is None,
        "newest": PATH,
        "older": _older(page.keys, page.searched_to) if page.more else None,
        "searched_to": page.searched_to,
        "path": PATH,
        "error": error,
        "most_reason": MOST_REASON,
    }


def _older(keys: list[RolloutKey], searched_to: float | None) -> str:
    key = keys[-1] if searched_to is None else RolloutKey(searched_to, "")
    return link(PATH, [], before=write_key(key))


def _aside(store: Store) -> tuple[list[SetAside], int]:
    """The latest first, and how many there are beyond."""
    with store.reading() as connection:
        subjects = quarantined(connection)[::-1]
        shown = subjects[:MOST_ASIDE]
        decisions = last_decisions(connection, shown)
        newest = {
            one: next(iter(newest_rollouts(connection, one.id, 1)), None)
            for one in shown
            if one.kind == "task"
        }
        asked = load_inputs(connection, [key.rollout_id for key in newest.values() if key])
    found = []
    for one in shown:
        key = newest.get(one)
        title = title_of_task(one.id, asked.get(key.rollout_id) if key else None) or one.id
        href = path_of(one.id) if one.kind == "task" else None
        found.append(SetAside(one, title, href, decisions[one]))
    return found, len(subjects) - len(shown)


def read_decision(form: Mapping[str, str], by: str) -> TaskDecision:
    """What a form decides. WrongLink: it is no form of ours."""
    subject, kind = form.get("subject", ""), form.get("kind", "")
    if subject not in ("task", "image"):
        raise WrongLink(f"subject: {subject[:40]!r}; a task or an image is decided about")
    if kind not in ("quarantine", "release"):
        raise WrongLink(f"kind: {kind[:40]!r}; use quarantine or release")
    if any("\0" in text for text in form.values()):
        raise WrongLink("the form has a NUL character; leave it out")
    subjects: dict[str, SubjectKind] = {"task": "task", "image": "image"}
    kinds: dict[str, Literal["quarantine", "release"]] = {
        "quarantine": "quarantine",
        "release": "release",
    }
    return TaskDecision(
        subject=subjects[subject],
        subject_id=form.get("id", ""),
        kind=kinds[kind],
        by=by,
        # A browser ends lines by \r\n.
        reason=form.get("reason", "").replace("\r\n", "\n").strip(),
        created_at=time.time(),
    )


def record(store: Store, decision: TaskDecision) -> str:
    """Where its subject is shown. ValueError: it cannot be decided, and why."""
    if len(decision.reason) > MOST_REASON:
        raise ValueError(f"reason: {len(decision.reason):,} characters; {MOST_REASON:,} at most")
    decide(store, decision)
    return path_of(decision.subject_id) if decision.subject == "task" else PATH
