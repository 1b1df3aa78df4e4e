"""`tracegrad tasks ls`: tasks with their attempts, and which are set aside, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from tracegrad.cli.render.console import hanging
from tracegrad.cli.render.rollout_list import task_columns
from tracegrad.cli.render.table import TableColumn, render_table
from tracegrad.cli.render.task_list import outcomes_text, reward_text, task_json
from tracegrad.inspect.display_text import format_number, one_line
from tracegrad.store.read.rollouts import TaskSummary
from tracegrad.store.read.task_health import SubjectHealth
from tracegrad.text_format import format_age

_STATE_STYLE = {"ok": "dim", "suspect": "yellow", "quarantined": "red"}


@dataclass(frozen=True, slots=True)
class TaskRow:
    """`success`: least reward of an attempt that succeeded."""

    summary: TaskSummary
    health: SubjectHealth
    success: float

    @property
    def pass_rate(self) -> float | None:
        rewards = self.summary.rewards
        return sum(one >= self.success for one in rewards) / len(rewards) if rewards else None


def render_task_rows(
    rows: Sequence[TaskRow],
    images: Sequence[SubjectHealth],
    asked: Mapping[str, str],
    width: int | None,
) -> list[Text]:
    """`images`: those that are not ok. `asked`: the beginning of a rollout's input, by rollout."""
    by_task = {row.summary.task_id: row for row in rows}

    def of(task: TaskSummary) -> TaskRow:
        return by_task[task.task_id]

    columns: list[TableColumn[TaskSummary]] = [
        *task_columns([row.summary for row in rows], lambda task: asked.get(task.last_rollout_id)),
        TableColumn(
            "age",
            lambda task: Text(format_age(task.last_opened_at, compact=True), style="dim"),
            "right",
            drop_order=2,
        ),
        TableColumn("attempts", lambda task: Text(f"{task.rollouts:,}"), "right"),
        TableColumn("pass", lambda task: _pass_rate(of(task)), "right"),
        TableColumn("reward", reward_text, "right", drop_order=1),
        TableColumn("outcomes", outcomes_text, min_width=12, drop_order=3),
        TableColumn("state", lambda task: _state(of(task).health)),
    ]
    lines = render_table(columns, [row.summary for row in rows], width)
    aside = [row.health for row in rows if row.health.state != "ok"] + [*images]
    for health in aside:
        lines += [Text(), *_why(health, width)]
    return lines


def task_row_json(row: TaskRow, asked: Mapping[str, str]) -> dict[str, Any]:
    return {
        **task_json(row.summary, asked),
        "pass_rate": row.pass_rate,
        **health_json(row.health),
    }


def health_json(health: SubjectHealth) -> dict[str, Any]:
    finding = health.finding if health.state == "suspect" else None
    source = finding or (health.decision if health.state == "quarantined" else None)
    return {
        "state": health.state,
        "by": health.by,
        "why": health.why,
        "evidence": None if source is None else source.evidence,
        "decision": None if health.decision is None else asdict(health.decision),
    }


def _pass_rate(row: TaskRow) -> Text:
    return Text("" if row.pass_rate is None else format_number(row.pass_rate))


def _state(health: SubjectHealth) -> Text:
    return Text(health.state, style=_STATE_STYLE[health.state])


def _why(health: SubjectHealth, width: int | None) -> list[Text]:
    """`task fix-7: quarantined by rule:fails 3 min ago` and why."""
    head = Text.assemble((one_line(str(health.subject)), "bold"), ": ", _state(health))
    head.append(f" by {one_line(health.by)}")
    if health.state == "quarantined" and health.decision is not None:
        head.append(f" {format_age(health.decision.created_at)} ago")
    why = Text(one_line(health.why), style="dim")
    return [
        *hanging(Text(), head, column=0, width=width),
        *hanging(Text(), why, column=2, width=width),
    ]
