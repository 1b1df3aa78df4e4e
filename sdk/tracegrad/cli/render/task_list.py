"""`tracegrad rollouts ls --by-task`: the groups that rollouts are compared within."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from tracegrad.cli.render.rollout_list import OUTCOME_STYLE, task_columns
from tracegrad.cli.render.table import TableColumn, render_table
from tracegrad.events import Outcome
from tracegrad.inspect.display_text import format_number
from tracegrad.store import OPEN
from tracegrad.store.read.rollouts import TaskSummary
from tracegrad.text_format import format_age


def render_tasks(
    rows: Sequence[TaskSummary], asked: Mapping[str, str], width: int | None
) -> list[Text]:
    """`asked`: the beginning of a rollout's input, by rollout."""
    columns: list[TableColumn[TaskSummary]] = [
        *task_columns(rows, lambda task: _asked(task, asked), id_drop_order=0),
        TableColumn(
            "age",
            lambda task: Text(format_age(task.last_opened_at, compact=True), style="dim"),
            "right",
            drop_order=2,
        ),
        TableColumn("rollouts", lambda task: Text(f"{task.rollouts:,}"), "right"),
        TableColumn("reward", reward_text, "right"),
        TableColumn("from", lambda task: _bound(task, min), "right", drop_order=1),
        TableColumn("to", lambda task: _bound(task, max), "right", drop_order=1),
        TableColumn("outcomes", outcomes_text, min_width=16),
    ]
    return render_table(columns, rows, width)


def _asked(task: TaskSummary, asked: Mapping[str, str]) -> str | None:
    """Rollouts without a task were asked many things."""
    return None if task.task_id is None else asked.get(task.last_rollout_id)


def task_json(task: TaskSummary, asked: Mapping[str, str]) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "asked": _asked(task, asked),
        "rollouts": task.rollouts,
        "outcomes": dict(task.outcomes),
        "rewarded": len(task.rewards),
        "reward_mean": task.mean,
        "reward_deviation": task.deviation,
        "reward_min": min(task.rewards, default=None),
        "reward_max": max(task.rewards, default=None),
        "last_opened_at": task.last_opened_at,
    }


def reward_text(task: TaskSummary) -> Text:
    text = Text("" if task.mean is None else format_number(task.mean))
    if task.deviation is None:
        return text
    return text.append(
        f" ± {format_number(task.deviation)}", style="dim" if task.deviation else "yellow"
    )


def _bound(task: TaskSummary, which: Any) -> Text:
    return Text(format_number(which(task.rewards)) if task.rewards else "", style="dim")


def outcomes_text(task: TaskSummary) -> Text:
    parts = []
    for name, amount in task.outcomes.most_common():
        style = "bright_blue" if name == OPEN else OUTCOME_STYLE[Outcome(name)]
        parts.append(Text(f"{amount:,} {name}", style=style))
    return Text(", ").join(parts)
