"""The list: the newest first, older ones as one goes down, and how many have come since.

It never changes under its reader: new ones are counted, and shown when he says so.
"""

from __future__ import annotations

import asyncio

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Footer, OptionList, Static
from textual.widgets.option_list import Option

from tracegrad.cli.render.rollout_list import render_rollouts
from tracegrad.cli.terminal.rollout_screen import RolloutScreen
from tracegrad.store import RolloutFilter, Store, StoreError
from tracegrad.store.read.rollout_pages import (
    NewerCount,
    RolloutKey,
    RolloutPage,
    count_newer,
    page_of_rollouts,
)
from tracegrad.store.types import RolloutSummary
from tracegrad.text_format import format_count

PAGE = 100
LOOK_S = 2.0  # between two looks at what is new
MOST_NEW = 100  # more are not counted


class _Rows(OptionList):
    """Ends at its ends: Textual's own goes on at the other one, and older rows may be coming."""

    BINDINGS = [Binding("enter", "select", "open")]  # noqa: RUF012

    def action_cursor_down(self) -> None:
        if self.highlighted != self.option_count - 1:
            super().action_cursor_down()

    def action_cursor_up(self) -> None:
        if self.highlighted != 0:
            super().action_cursor_up()


class RolloutListScreen(Screen[None]):
    BINDINGS = [  # noqa: RUF012
        Binding("j", "down", show=False),
        Binding("k", "up", show=False),
        Binding("r", "newest", "show what is new"),
    ]

    def __init__(self, store: Store, wanted: RolloutFilter) -> None:
        super().__init__()
        self._store, self._wanted = store, wanted
        self._rows: list[RolloutSummary] = []
        self._asked: dict[str, str] = {}
        self._before: RolloutKey | None = None  # where older ones begin; None: there are none

    def compose(self) -> ComposeResult:
        yield Static(classes="heads", markup=False)
        yield _Rows(markup=False)
        yield Static(classes="status", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.action_newest()
        self.set_interval(LOOK_S, self._look)

    def on_resize(self) -> None:
        self._draw()

    def action_down(self) -> None:
        self.query_one(OptionList).action_cursor_down()

    def action_up(self) -> None:
        self.query_one(OptionList).action_cursor_up()

    def on_option_list_option_selected(self, chosen: OptionList.OptionSelected) -> None:
        rollout_id = self._rows[chosen.option_index].rollout_id
        self.app.push_screen(RolloutScreen(self._store, self._wanted, rollout_id))

    def on_option_list_option_highlighted(self, at: OptionList.OptionHighlighted) -> None:
        if at.option_index == len(self._rows) - 1 and self._before is not None:
            self._read_older(self._before)

    @work(exclusive=True)
    async def action_newest(self) -> None:
        page = await self._page(None)
        if page is not None:
            self._rows, self._asked = [], {}
            self._take(page)
            self.query_one(OptionList).highlighted = 0 if self._rows else None

    @work(exclusive=True)
    async def _read_older(self, before: RolloutKey) -> None:
        page = await self._page(before)
        if page is not None and before == self._before:
            self._take(page)

    @work(exclusive=True, group="look")
    async def _look(self) -> None:
        first = self._rows[0] if self._rows else None
        after = None if first is None else RolloutKey(first.opened_at, first.rollout_id)
        try:
            newer = await asyncio.to_thread(self._count_newer, after)
        except StoreError as error:
            self._say(str(error))
            return
        if newer.count:
            more = "" if newer.complete and newer.count < MOST_NEW else "+"
            self._say(f"{newer.count}{more} new: r shows them")

    def _count_newer(self, after: RolloutKey | None) -> NewerCount:
        with self._store.reading() as connection:
            return count_newer(connection, self._wanted, after, most=MOST_NEW)

    async def _page(self, before: RolloutKey | None) -> RolloutPage | None:
        """None: the store does not answer, which is said."""

        def read() -> RolloutPage:
            with self._store.reading() as connection:
                return page_of_rollouts(connection, self._wanted, before=before, limit=PAGE)

        try:
            return await asyncio.to_thread(read)
        except StoreError as error:
            self._say(str(error))
            return None

    def _take(self, page: RolloutPage) -> None:
        """Behind those that are there."""
        self._rows += page.rows
        self._asked |= page.asked
        self._before = None
        if page.searched_to is not None:
            self._before = RolloutKey(page.searched_to, "")
        elif page.more:
            self._before = RolloutKey(page.rows[-1].opened_at, page.rows[-1].rollout_id)
        self._draw()
        self._say("")
        if not page.rows and self._before is not None:  # a search that has not found one yet
            self._read_older(self._before)

    def _draw(self) -> None:
        # Without the padding and the scroll bar.
        heads, *lines = render_rollouts(self._rows, self._asked, max(20, self.size.width - 4))
        self.query_one(".heads", Static).update(heads)
        options = self.query_one(OptionList)
        at = options.highlighted
        options.set_options(Option(line) for line in lines)
        options.highlighted = at if at is None or at < len(lines) else None

    def _say(self, words: str) -> None:
        """Without words: how many are shown."""
        self.query_one(".status", Static).update(words or self._shown())

    def _shown(self) -> str:
        if not self._rows and self._before is None:
            return "no rollouts " + ("yet" if self._wanted.matches_all else "match")
        return format_count(len(self._rows), "rollout") + (", and older ones" * bool(self._before))
