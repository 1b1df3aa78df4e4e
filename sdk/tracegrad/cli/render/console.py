"""Lines of text for a terminal or a pipe.

On a terminal, and where COLUMNS says how wide, lines are wrapped and tables cut to fit. In a pipe
every line is as long as it is: what `grep` looks for is never broken in two.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator

import typer
from rich.console import Console
from rich.text import Text

_TAB = 4
# A rule in a pipe need not be as long as the longest line.
_RULE_IN_PIPE = 72


class Terminal:
    """Standard output. `width` is in columns; None: as wide as it takes."""

    def __init__(self) -> None:
        # Agents' texts hold brackets and paths: nothing in them is markup or worth a colour.
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        narrow = self._console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
        self.width: int | None = self._console.width if narrow else None

    def print(self, lines: Iterable[Text]) -> None:
        for line in lines:
            self._console.print(line)


# Wraps text; prints nothing.
_WRAPPING = Console(file=io.StringIO(), color_system=None)


def wrapped(text: Text, width: int | None) -> list[Text]:
    """At least one line."""
    if width is None:
        text.expand_tabs(_TAB)
        return list(text.split("\n", allow_blank=True)) or [Text()]
    return list(text.wrap(_WRAPPING, max(1, width), tab_size=_TAB)) or [Text()]


def hanging(
    label: Text, body: Text, *, column: int, width: int | None, margin: int = 0
) -> Iterator[Text]:
    """`label`, and `body` in lines that begin `column` columns behind the label's beginning."""
    start = max(column, label.cell_len + 2) if label.cell_len else column
    room = None if width is None else width - margin - start
    if room is not None and room < 8:  # next to nothing is left beside the label
        yield Text(" " * margin).append_text(label)
        label, start = Text(), min(2, margin)
        room = max(1, (width or 0) - margin - start)
    lead = Text(" " * margin).append_text(label)
    for line in wrapped(body, room):
        lead.pad_right(margin + start - lead.cell_len)
        lead.append_text(line)
        lead.rstrip()
        yield lead
        lead = Text(" " * margin)


def indented(body: Text, *, margin: int, width: int | None) -> Iterator[Text]:
    return hanging(Text(), body, column=0, width=width, margin=margin)


def rule(title: Text, width: int | None) -> Text:
    line = Text().append_text(title)
    length = _RULE_IN_PIPE if width is None else width
    line.truncate(max(1, length), overflow="ellipsis")
    if (rest := length - line.cell_len - 1) > 0:
        line.append(" " + "─" * rest, style="dim")
    return line


def show_progress(text: str) -> None:
    """In the last line of a terminal, in place of what stood there; scripts want the end alone."""
    if sys.stderr.isatty():
        typer.echo(f"\r\x1b[K{text} …", nl=False, err=True)


def clear_progress() -> None:
    if sys.stderr.isatty():
        typer.echo("\r\x1b[K", nl=False, err=True)
