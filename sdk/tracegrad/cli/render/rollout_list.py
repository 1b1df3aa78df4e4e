"""`tracegrad rollouts ls` as a table that fits the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from tracegrad.cli.render.format import (
    OUTCOME_STYLE,
    age,
    number,
    one_line,
    tag_text,
    training_text,
)
from tracegrad.cli.render.table import Column, table
from tracegrad.store import RolloutRow


def rollout_table(rows: Sequence[RolloutRow], width: int | None) -> list[Text]:
    return table(_columns(rows), rows, width)


def _columns(rows: Sequence[RolloutRow]) -> list[Column[RolloutRow]]:
    short = short_id_width([row.rollout_id for row in rows])
    columns: list[Column[RolloutRow]] = [
        Column("id", lambda row: Text(one_line(row.rollout_id[:short]), style="cyan")),
        Column("age", lambda row: Text(age(row.opened_at), style="dim"), "right", leave=2),
        Column("task", task_text, least=8),
        Column("outcome", outcome_text),
        Column("reward", _reward, justify="right"),
        Column("turns", lambda row: Text(f"{row.turns:,}"), justify="right", leave=1),
        Column("tokens", lambda row: Text(f"{row.completion_tokens:,}"), justify="right", leave=5),
        Column("training", lambda row: Text(training_text(row))),
    ]
    # What is the same everywhere tells nothing.
    if len({row.agent for row in rows}) > 1:
        columns.append(
            Column("agent", lambda row: Text(one_line(row.agent or "")), least=6, leave=4)
        )
    if any(row.tags for row in rows):
        columns.append(
            Column("tags", lambda row: Text(tag_text(row.tags), style="dim"), least=10, leave=3)
        )
    return columns


def task_text(row: RolloutRow) -> Text:
    return Text(one_line(row.task_id)) if row.task_id else Text("untitled", style="dim")


def _reward(row: RolloutRow) -> Text:
    return Text("" if row.reward is None else number(row.reward))


def outcome_text(row: RolloutRow) -> Text:
    if row.outcome is None:
        return Text("open", style="bright_blue")
    return Text(row.outcome.value, style=OUTCOME_STYLE[row.outcome])


def short_id_width(ids: Sequence[str]) -> int:
    """So many first characters tell these ids apart; at least 12, a millisecond of `new_id`."""
    longest = max(map(len, ids), default=0)
    width = min(12, longest)
    while width < longest and len({i[:width] for i in ids}) < len(set(ids)):
        width += 1
    return width
