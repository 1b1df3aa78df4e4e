"""`tracegrad rollouts pass`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from tracegrad.cli.render.table import TableColumn, render_table
from tracegrad.inspect.display_text import format_number, one_line
from tracegrad.inspect.pass_rates import PassRate
from tracegrad.text_format import format_count

Row = tuple[str, PassRate]


def render_pass_rates(
    rates: Mapping[str, PassRate], title: str, ks: Sequence[int], width: int | None
) -> list[Text]:
    rows = list(rates.items())
    columns: list[TableColumn[Row]] = [
        TableColumn(title, lambda row: Text(one_line(row[0])), min_width=12, max_width=44),
        TableColumn("tasks", lambda row: Text(f"{len(row[1].counts):,}"), "right", drop_order=2),
        TableColumn("attempts", lambda row: Text(f"{row[1].attempts:,}"), "right"),
        TableColumn("unknown", lambda row: _count(row[1].unknown), "right", drop_order=1),
        TableColumn("success", lambda row: _share(row[1].success), "right"),
        *(_pass_column(k) for k in ks),
        TableColumn("reward", lambda row: _number(row[1].reward), "right", drop_order=3),
        TableColumn(
            "tokens/success", lambda row: _number(row[1].tokens_per_success), "right", drop_order=1
        ),
    ]
    return [*render_table(columns, rows, width), *_few(rates, ks)]


def pass_rate_json(name: object, rate: PassRate, by: str, ks: Sequence[int]) -> dict[str, Any]:
    return {
        by: name,
        "tasks": len(rate.counts),
        "attempts": rate.attempts,
        "unknown": rate.unknown,
        "successes": rate.successes,
        "success": rate.success,
        "reward_mean": rate.reward,
        "tokens_per_success": rate.tokens_per_success,
        "pass": {
            str(k): {"value": found.value, "tasks": found.tasks, "too_few": found.too_few}
            for k, found in ((k, rate.at(k)) for k in ks)
        },
    }


def _pass_column(k: int) -> TableColumn[Row]:
    return TableColumn(f"pass@{k}", lambda row: _share(row[1].at(k).value), "right")


def _few(rates: Mapping[str, PassRate], ks: Sequence[int]) -> list[Text]:
    """What a pass@k leaves out, which would be read as of all tasks otherwise."""
    lines = []
    for k in ks:
        left_out = sum(rate.at(k).too_few for rate in rates.values())
        if left_out:
            tasks = format_count(left_out, "task")
            words = f"pass@{k} is without {tasks} of fewer than {k} attempts"
            lines.append(Text(words, style="dim"))
    return lines


def _count(number: int) -> Text:
    return Text(f"{number:,}" if number else "", style="yellow")


def _share(value: float | None) -> Text:
    return Text("" if value is None else f"{value:.1%}")


def _number(value: float | None) -> Text:
    return Text("" if value is None else format_number(value))
