"""What commands print: a line of JSON, or tables of plain words in the width of the terminal, or in
a pipe their own.

Nothing is markup: ids of tasks, reasons of a user's own and paths hold brackets.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from typing import Any

import orjson
from rich.console import Console, RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

# In a pipe every line is as long as it is: what `grep` looks for is never cut.
_LONGEST = 10_000


def print_json(value: Any) -> None:
    """One line. A number that is not finite is null: JSON has no word for it."""
    print(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode(), flush=True)


class PlainTable(Table):
    """Columns beside each other, without lines between them."""

    def __init__(self, *, header: bool = True) -> None:
        super().__init__(box=None, padding=(0, 2, 0, 0), show_header=header, pad_edge=False)

    def add_row(
        self,
        *cells: RenderableType | None,
        style: StyleType | None = None,
        end_section: bool = False,
    ) -> None:
        plain = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        super().add_row(*plain, style=style, end_section=end_section)


def plain_table(*columns: str, words: Collection[str] = ()) -> PlainTable:
    """The first column and those of `words` are broken where a terminal is too narrow; the others
    are of numbers, which stay whole."""
    made = PlainTable()
    for i, name in enumerate(columns):
        if i == 0 or name in words:
            made.add_column(name, overflow="fold")
        else:
            made.add_column(name, justify="right", no_wrap=True)
    return made


def print_report(report: RenderableType, console: Console) -> None:
    """On a terminal, and where COLUMNS is set, to fit; else in full."""
    if not (console.is_terminal or os.environ.get("COLUMNS", "").isdigit()):
        console.width = _LONGEST
    console.print(report, highlight=False)


def print_error(line: str, console: Console) -> None:
    """In red and unbroken: what it names is never markup."""
    console.print(Text(line, style="red"), soft_wrap=True)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hides the progress bars that transformers draws while it reads or writes a model."""
    from transformers.utils import logging  # seconds that a refusal need not wait

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
