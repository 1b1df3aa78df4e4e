"""Tables of the terminal: what gives way where it is narrow."""

from __future__ import annotations

from rich.text import Text

from tracegrad.cli.render.table import TableColumn, render_table


def test_what_names_the_row_is_cut_last() -> None:
    columns: list[TableColumn[int]] = [
        TableColumn("turn", lambda row: Text(f"│  │  ├─ {row}")),
        TableColumn("reward", lambda _: Text("a long word"), min_width=11),
        TableColumn("training", lambda _: Text("a longer word"), min_width=13),
    ]
    _, line = render_table(columns, [10], 26)
    assert line.plain.startswith("│  │  ├─ 10 ")
    assert line.cell_len <= 26
