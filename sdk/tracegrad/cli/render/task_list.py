"""`tracegrad rollouts ls --by-task`: the groups that rollouts are compared within."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text
from sqlalchemy import select

from tracegrad.cli.render.format import OUTCOME_STYLE, format_age, format_number, one_line
from tracegrad.cli.render.table import TableColumn, render_table
from tracegrad.events import Outcome
from tracegrad.store import OPEN, RolloutFilter, Store
from tracegrad.store.expressions import latest_reward
from tracegrad.store.models import Rollouts
from tracegrad.store.read.choosing import RolloutOrder


@dataclass(slots=True)
class TaskSummary:
    """What is known of its rollouts; `task_id` is None for those without a task."""

    task_id: str | None
    last_opened_at: float
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


def summarize_tasks(store: Store, wanted: RolloutFilter, order: RolloutOrder) -> list[TaskSummary]:
    """The task with the newest rollout first, or that with the highest mean reward."""
    query = (
        select(Rollouts.task_id, Rollouts.opened_at, Rollouts.outcome, latest_reward())
        .where(wanted.where())
        .order_by(Rollouts.opened_at.desc())
    )
    found: dict[str | None, TaskSummary] = {}
    with store.reading() as connection:
        for task_id, opened_at, outcome, reward in connection.execute(query):
            task = found.setdefault(task_id, TaskSummary(task_id, opened_at))
            task.outcomes[outcome or OPEN] += 1
            if reward is not None:
                task.rewards.append(reward)
    every = list(found.values())
    if order is RolloutOrder.REWARD:
        every.sort(key=lambda task: -math.inf if task.mean is None else task.mean, reverse=True)
    return every


def render_tasks(rows: Sequence[TaskSummary], width: int | None) -> list[Text]:
    columns: list[TableColumn[TaskSummary]] = [
        TableColumn("task", _name, min_width=8),
        TableColumn(
            "age",
            lambda task: Text(format_age(task.last_opened_at), style="dim"),
            "right",
            drop_order=2,
        ),
        TableColumn("rollouts", lambda task: Text(f"{task.rollouts:,}"), "right"),
        TableColumn("reward", _reward, "right"),
        TableColumn("from", lambda task: _bound(task, min), "right", drop_order=1),
        TableColumn("to", lambda task: _bound(task, max), "right", drop_order=1),
        TableColumn("outcomes", _outcomes, min_width=10),
    ]
    return render_table(columns, rows, width)


def task_json(task: TaskSummary) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "rollouts": task.rollouts,
        "outcomes": dict(task.outcomes),
        "rewarded": len(task.rewards),
        "reward_mean": task.mean,
        "reward_deviation": task.deviation,
        "reward_min": min(task.rewards, default=None),
        "reward_max": max(task.rewards, default=None),
        "last_opened_at": task.last_opened_at,
    }


def _name(task: TaskSummary) -> Text:
    return Text(one_line(task.task_id)) if task.task_id else Text("untitled", style="dim")


def _reward(task: TaskSummary) -> Text:
    text = Text("" if task.mean is None else format_number(task.mean))
    if task.deviation is None:
        return text
    return text.append(
        f" ± {format_number(task.deviation)}", style="dim" if task.deviation else "yellow"
    )


def _bound(task: TaskSummary, which: Any) -> Text:
    return Text(format_number(which(task.rewards)) if task.rewards else "", style="dim")


def _outcomes(task: TaskSummary) -> Text:
    parts = []
    for name, amount in task.outcomes.most_common():
        style = "bright_blue" if name == OPEN else OUTCOME_STYLE[Outcome(name)]
        parts.append(Text(f"{amount:,} {name}", style=style))
    return Text(", ").join(parts)
