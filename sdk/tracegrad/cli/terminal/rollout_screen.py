"""One rollout, as `tracegrad rollouts show` prints it, and the way to its neighbours."""

from __future__ import annotations

import asyncio

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Footer, RichLog

from tracegrad.cli.render.rollout import render_rollout
from tracegrad.store import RolloutFilter, Store, StoreError
from tracegrad.store.read.rollout_pages import RolloutKey, next_rollout, rollout_key


class RolloutScreen(Screen[None]):
    """`wanted`: of which rollouts its neighbours are."""

    BINDINGS = [  # noqa: RUF012
        Binding("u,escape", "app.pop_screen", "back"),
        Binding("n", "beside(False)", "older"),
        Binding("p", "beside(True)", "newer"),
        Binding("t", "show('tokens')", "tokens"),
        Binding("f", "show('full')", "whole messages"),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]

    def __init__(self, store: Store, wanted: RolloutFilter, rollout_id: str) -> None:
        super().__init__()
        self._store, self._wanted, self._rollout_id = store, wanted, rollout_id
        self._shows = {"tokens": False, "full": False}

    def compose(self) -> ComposeResult:
        yield RichLog(max_lines=None, wrap=False, markup=False, highlight=False, auto_scroll=False)
        yield Footer()

    def on_mount(self) -> None:
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def action_scroll(self, lines: int) -> None:
        self.query_one(RichLog).scroll_relative(y=lines, animate=False)

    def action_show(self, what: str) -> None:
        self._shows[what] = not self._shows[what]
        self._draw()

    @work(exclusive=True, group="beside")
    async def action_beside(self, newer: bool) -> None:
        try:
            found = await asyncio.to_thread(self._beside, newer)
        except StoreError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        if found is None:
            self.notify(f"there is none that is {'newer' if newer else 'older'}")
            return
        self._rollout_id = found
        self.query_one(RichLog).scroll_home(animate=False)
        self._draw()

    def _beside(self, newer: bool) -> str | None:
        with self._store.reading() as connection:
            key = rollout_key(connection, self._rollout_id)
            while key is not None:
                found = next_rollout(connection, self._wanted, key, newer=newer)
                if found.rollout_id is not None or found.searched_to is None:
                    return found.rollout_id
                key = RolloutKey(found.searched_to, "")  # it had looked for long enough
        return None

    @work(exclusive=True, group="draw")
    async def _draw(self) -> None:
        # Without the padding and the scroll bar.
        lines = await asyncio.to_thread(self._lines, max(20, self.size.width - 4))
        log = self.query_one(RichLog)
        log.clear()
        for line in lines:
            log.write(line, scroll_end=False)

    def _lines(self, width: int) -> list[Text]:
        try:
            detail = self._store.rollout(self._rollout_id)
        except StoreError as error:
            return [Text(str(error), style="red")]
        return list(render_rollout(detail, width, **self._shows))
