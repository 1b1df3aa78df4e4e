"""The program: a list of rollouts, and above it the one that was opened."""

from __future__ import annotations

from textual.app import App
from textual.binding import Binding

from tracegrad.cli.terminal.rollout_list_screen import RolloutListScreen
from tracegrad.cli.terminal.rollout_screen import RolloutScreen
from tracegrad.store import RolloutFilter, Store


class RolloutBrowser(App[None]):
    """Of the rollouts that pass `wanted`. `opened`: the id of the one that it begins with."""

    TITLE = "tracegrad"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [Binding("q", "quit", "quit")]  # noqa: RUF012 (Textual's own form)
    CSS = """
    .heads { height: 1; padding: 0 1; }
    .status { height: 1; padding: 0 1; color: $text-muted; }
    OptionList, RichLog { height: 1fr; border: none; padding: 0 1; scrollbar-gutter: stable; }
    """

    def __init__(self, store: Store, wanted: RolloutFilter, opened: str | None = None) -> None:
        super().__init__(ansi_color=True)
        self._store, self._wanted, self._opened = store, wanted, opened

    def on_mount(self) -> None:
        self.push_screen(RolloutListScreen(self._store, self._wanted))
        if self._opened is not None:
            self.push_screen(RolloutScreen(self._store, self._wanted, self._opened))
