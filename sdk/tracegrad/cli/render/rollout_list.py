"""`tracegrad rollouts ls` as a table that fits the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from rich.text import Text

from tracegrad.cli.render.table import TableColumn, render_table
from tracegrad.events import Outcome
from tracegrad.inspect.display_text import (
    format_number,
    one_line,
    tag_text,
    training_text,
)
from tracegrad.store import RolloutSummary
from tracegrad.store.read.rollouts import TaskSummary
from tracegrad.store.read.task_titles import is_hash, short_task_ids, title_of_task
from tracegrad.text_format import format_age, shorten_apart

OUTCOME_STYLE = {
    Outcome.COMPLETED: "green",
    Outcome.AGENT_ERROR: "red",
    Outcome.BUDGET: "yellow",
    Outcome.ENV_ERROR: "magenta",
    Outcome.INFRA_ERROR: "magenta",
    Outcome.ABORTED: "magenta",
}

Row = TypeVar("Row", RolloutSummary, TaskSummary)


def render_rollouts(
    rows: Sequence[RolloutSummary], asked: Mapping[str, str], width: int | None
) -> list[Text]:
    """`asked`: the beginning of a rollout's input, by rollout."""
    return render_table(_columns(rows, asked), rows, width)


def _columns(
    rows: Sequence[RolloutSummary], asked: Mapping[str, str]
) -> list[TableColumn[RolloutSummary]]:
    short = short_id_width([row.rollout_id for row in rows])
    columns: list[TableColumn[RolloutSummary]] = [
        TableColumn("id", lambda row: Text(one_line(row.rollout_id[:short]), style="cyan")),
        TableColumn(
            "age",
            lambda row: Text(format_age(row.opened_at, compact=True), style="dim"),
            "right",
            drop_order=2,
        ),
        *task_columns(rows, lambda row: asked.get(row.rollout_id)),
        TableColumn("outcome", outcome_text),
        TableColumn("reward", _reward, justify="right"),
        TableColumn("turns", lambda row: Text(f"{row.turns:,}"), justify="right", drop_order=1),
        TableColumn(
            "tokens", lambda row: Text(f"{row.completion_tokens:,}"), justify="right", drop_order=5
        ),
        TableColumn("training", lambda row: Text(training_text(row))),
    ]
    if any(_idle(row) for row in rows):
        columns.append(TableColumn("idle", lambda row: Text(_idle(row), style="dim"), drop_order=3))
    # What is the same in every row is left out.
    if len({row.agent for row in rows}) > 1:
        columns.append(
            TableColumn(
                "agent", lambda row: Text(one_line(row.agent or "")), min_width=6, drop_order=4
            )
        )
    if any(row.tags for row in rows):
        columns.append(
            TableColumn(
                "tags",
                lambda row: Text(tag_text(row.tags), style="dim"),
                min_width=10,
                drop_order=3,
            )
        )
    return columns


def task_columns(
    rows: Sequence[Row], asked: Callable[[Row], str | None], *, id_drop_order: int = 6
) -> Iterator[TableColumn[Row]]:
    """What each is about; where that is not the task's id, the id too, if there is room: options
    take that, or its beginning."""
    hashes = [row.task_id for row in rows if row.task_id is not None and is_hash(row.task_id)]
    short = short_task_ids(hashes)
    shown_ids = [short.get(row.task_id or "") for row in rows]

    def title(row: Row) -> Text:
        return task_text(row.task_id, asked(row))

    def task_id(row: Row) -> Text:
        return Text(row.task_id if row.task_id and row.task_id in short else "", style="dim")

    def fit_titles(cells: Sequence[Text], width: int) -> list[Text]:
        return fit_apart(cells, shown_ids, width)

    prose = any(row.task_id != title_of_task(row.task_id, asked(row)) for row in rows)
    yield TableColumn("task", title, min_width=24 if prose else 8, fit=fit_titles)
    if prose and hashes:
        yield TableColumn(
            "task id",
            task_id,
            min_width=max(map(len, short.values())),
            fit=lambda cells, width: [cell[:width] for cell in cells],  # a beginning, to be copied
            drop_order=id_drop_order,
        )


def fit_apart(titles: Sequence[Text], ids: Sequence[str | None], width: int) -> list[Text]:
    """Titles in so many cells, those of different tasks (`ids`: their short ids) different: by
    where they part, or by their ids."""
    shown = shorten_apart([title.plain for title in titles], width, cut=_cut_cells)
    tasks: dict[str, set[str | None]] = {}
    for title, task_id in zip(titles, ids, strict=True):
        tasks.setdefault(shown[title.plain], set()).add(task_id)
    fitted = []
    for title, task_id in zip(titles, ids, strict=True):
        text = shown[title.plain]
        if task_id is not None and len(tasks[text]) > 1:
            text = f"{_cut_cells(title.plain, width - len(task_id) - 1)} {task_id}"
        fitted.append(Text(text, style=title.style))
    return fitted


def _cut_cells(text: str, width: int) -> str:
    cell = Text(text)
    cell.truncate(width, overflow="ellipsis")
    return cell.plain


def task_text(task_id: str | None, asked: str | None) -> Text:
    title = title_of_task(task_id, asked)
    return Text(one_line(title)) if title else Text("untitled", style="dim")


def _reward(row: RolloutSummary) -> Text:
    return Text("" if row.reward is None else format_number(row.reward))


def _idle(row: RolloutSummary) -> str:
    """Of those that nobody opened: `12s` since the last call, or `60s, closed`."""
    if row.idle_s is not None:
        return f"{row.idle_s:g}s, closed"
    if row.opened or row.last_turn_at is None:
        return ""
    return format_age(row.last_turn_at, compact=True)


def outcome_text(row: RolloutSummary) -> Text:
    if row.outcome is None:
        return Text("open", style="bright_blue")
    return Text(row.outcome.value, style=OUTCOME_STYLE[row.outcome])


def short_id_width(ids: Sequence[str]) -> int:
    """So many first characters distinguish these ids; at least 12, a millisecond of `new_id`."""
    longest = max(map(len, ids), default=0)
    width = min(12, longest)
    while width < longest and len({i[:width] for i in ids}) < len(set(ids)):
        width += 1
    return width
