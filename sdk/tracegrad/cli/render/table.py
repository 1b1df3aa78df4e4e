"""Tables that fit: columns are cut, and leave, until the others have room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from rich.text import Text

_GAP = 2

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class TableColumn(Generic[R]):
    title: str
    cell: Callable[[R], Text]
    justify: Literal["left", "right"] = "left"
    min_width: int | None = None  # may be cut to so many characters
    max_width: int | None = None  # never wider, even in a pipe
    # Cells in at most so many terminal cells, in the rows' order; without it their ends are cut.
    fit: Callable[[Sequence[Text], int], Sequence[Text]] | None = None
    drop_order: int = 0  # columns with a higher number leave a narrow terminal first; 0 stays


def render_table(
    columns: Sequence[TableColumn[R]], rows: Sequence[R], width: int | None
) -> list[Text]:
    """The titles, then a line for each row."""
    cells = {column.title: [column.cell(row) for row in rows] for column in columns}
    widths = _column_widths(columns, cells, width)
    shown = [column for column in columns if column.title in widths]
    for column in shown:
        if column.fit is not None:
            cells[column.title] = [*column.fit(cells[column.title], widths[column.title])]
    heads = [Text(column.title, style="bold") for column in shown]
    lines = [_line(shown, heads, widths)]
    for number in range(len(rows)):
        row = [cells[column.title][number] for column in shown]
        lines.append(_line(shown, row, widths))
    return lines


def _column_widths(
    columns: Sequence[TableColumn[R]], cells: Mapping[str, Sequence[Text]], width: int | None
) -> dict[str, int]:
    """The width of each column that stays."""
    whole = {
        column.title: min(
            max(len(column.title), *(cell.cell_len for cell in cells[column.title]), 0),
            column.max_width or 1 << 30,
        )
        for column in columns
    }
    if width is None:
        return whole
    least = {
        column.title: min(whole[column.title], column.min_width or whole[column.title])
        for column in columns
    }
    for column in sorted(columns, key=lambda column: -column.drop_order):
        if column.drop_order and _total(least) > width:
            del least[column.title]
    # The last resort: what must stay is cut like the rest, and at the very last what names the row.
    for names in ([*least][1:], [*least]):
        while _total(least) > width and max((least[name] for name in names), default=0) > 4:
            least[max(names, key=lambda name: least[name])] -= 1
    spare = max(0, width - _total(least))
    for title, smallest in least.items():
        more = min(spare, whole[title] - smallest)
        least[title] = smallest + more
        spare -= more
    return least


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _line(
    columns: Sequence[TableColumn[R]], cells: Sequence[Text], widths: Mapping[str, int]
) -> Text:
    line = Text()
    at = 0
    for column, cell in zip(columns, cells, strict=True):
        width = widths[column.title]
        cut = cell.copy()
        cut.truncate(width, overflow="ellipsis")
        space = width - cut.cell_len
        before = space if column.justify == "right" else 0
        line.append(" " * (at - line.cell_len + before)).append_text(cut)
        at += width + _GAP
    line.rstrip()
    return line
