"""Progress for people: bars on a terminal, now and then a line anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

LINE_EVERY_S = 10.0


class Phase:
    """One stretch of work; `update` as often as you like."""

    def __init__(self, name: str, progress: Progress | None, total: int | None) -> None:
        self.name = name
        self.note = ""
        self._progress = progress
        self._task = progress.add_task(name, total=total, note="") if progress else None
        self._total = total
        self._printed = time.monotonic()

    def update(self, done: int | None = None, note: str | None = None) -> None:
        self.note = self.note if note is None else note
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, note=self.note)
        elif time.monotonic() - self._printed > LINE_EVERY_S:
            self._printed = time.monotonic()
            count = "" if done is None or self._total is None else f" {done}/{self._total}"
            print(f"  {self.name}{count}  {self.note}", flush=True)


Seen = Callable[[int, int, float], None]  # steps done, steps in all, loss


class Screen:
    """Everything but the last line of the demo goes through here."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """A bar while the work lasts; when it is done, one line with its time and last note."""
        started = time.monotonic()
        if self.console.is_terminal:
            with self._bars() as progress:
                phase = Phase(name, progress, total)
                yield phase
        else:
            print(f"  {name} ...", flush=True)
            phase = Phase(name, None, total)
            yield phase
        seconds = time.monotonic() - started
        self.console.print(f"[green]✓[/] {name}  [dim]{seconds:.0f} s[/]  {phase.note}")

    def warm_start(self, steps: int, make: Callable[[Seen], Path]) -> Path:
        """What `make` gives, which is told whom to report steps and loss to."""
        with self.phase("warm start", steps) as phase:
            folder = make(lambda done, _, loss: phase.update(done, f"loss {loss:.2f}"))
            if not phase.note:
                phase.note = "kept from an earlier run"
        return folder

    def _bars(self) -> Progress:
        return Progress(
            TextColumn("  {task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20, table_column=Column(min_width=10)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            # The note gives way when the terminal is narrow; what counts stands at its head.
            TextColumn(
                "{task.fields[note]}",
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=self.console,
            transient=True,
            expand=True,
        )
