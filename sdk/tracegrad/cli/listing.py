"""`tracegrad rollouts ls` as a table that fits the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from tracegrad.cli.words import OUTCOME_STYLE, age, number, printable, tag_text, training_text
from tracegrad.store import RolloutRow

_GAP = 2


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cell: Callable[[RolloutRow], Text]
    justify: Literal["left", "right"] = "left"
    least: int | None = None  # may be cut to so many characters
    leave: int = 0  # columns with a higher number leave a narrow terminal first; 0 stays


def rollout_table(rows: Sequence[RolloutRow], width: int) -> Table:
    columns = _columns(rows)
    widths = _fit(columns, rows, width)
    table = Table(box=None, header_style="bold", padding=(0, _GAP, 0, 0), pad_edge=False)
    for column in columns:
        if column.title in widths:
            table.add_column(
                column.title,
                justify=column.justify,
                width=widths[column.title],
                no_wrap=True,
                overflow="ellipsis",
            )
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns if column.title in widths))
    return table


def _columns(rows: Sequence[RolloutRow]) -> list[_Column]:
    short = short_id_width([row.rollout_id for row in rows])
    columns = [
        _Column("id", lambda row: Text(row.rollout_id[:short], style="cyan")),
        _Column("age", lambda row: Text(age(row.opened_at), style="dim"), "right", leave=2),
        _Column("task", _task, least=8),
        _Column("outcome", outcome_text),
        _Column("reward", _reward, justify="right"),
        _Column("turns", lambda row: Text(str(row.turns)), justify="right", leave=1),
        _Column("tokens", lambda row: Text(f"{row.completion_tokens:,}"), justify="right", leave=5),
        _Column("training", lambda row: Text(training_text(row))),
    ]
    # What is the same everywhere tells nothing.
    if len({row.agent for row in rows}) > 1:
        columns.append(
            _Column("agent", lambda row: Text(printable(row.agent or "")), least=6, leave=4)
        )
    if any(row.tags for row in rows):
        columns.append(
            _Column("tags", lambda row: Text(tag_text(row.tags), style="dim"), least=10, leave=3)
        )
    return columns


def _fit(columns: Sequence[_Column], rows: Sequence[RolloutRow], width: int) -> dict[str, int]:
    """The width of each column that stays: some leave until the others fit, cut if need be."""
    whole = {
        column.title: max(len(column.title), *(column.cell(row).cell_len for row in rows))
        for column in columns
    }
    least = {
        column.title: min(whole[column.title], column.least or whole[column.title])
        for column in columns
    }
    for column in sorted(columns, key=lambda column: -column.leave):
        if column.leave and _total(least) > width:
            del least[column.title]
    spare = max(0, width - _total(least))
    for title, smallest in least.items():
        more = min(spare, whole[title] - smallest)
        least[title] = smallest + more
        spare -= more
    return least


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _task(row: RolloutRow) -> Text:
    return Text(printable(row.task_id)) if row.task_id else Text("untitled", style="dim")


def _reward(row: RolloutRow) -> Text:
    return Text("" if row.reward is None else number(row.reward))


def outcome_text(row: RolloutRow) -> Text:
    if row.outcome is None:
        return Text("open", style="blue")
    return Text(row.outcome.value, style=OUTCOME_STYLE[row.outcome])


def short_id_width(ids: Sequence[str]) -> int:
    """So many first characters tell these ids apart; at least 12, a millisecond of `new_id`."""
    longest = max(map(len, ids), default=0)
    width = min(12, longest)
    while width < longest and len({i[:width] for i in ids}) < len(set(ids)):
        width += 1
    return width
