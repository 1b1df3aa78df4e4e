"""`tracegrad ui`: driven by its keys, and read as it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList, RichLog, Static
from typer.testing import CliRunner

from support.cli.sample_rollouts import every_sample
from support.store.events import rollout_events
from tracegrad.cli.app import app
from tracegrad.cli.terminal import rollout_list_screen, rollout_screen
from tracegrad.cli.terminal.app import RolloutBrowser
from tracegrad.cli.terminal.rollout_list_screen import RolloutListScreen
from tracegrad.cli.terminal.rollout_screen import RolloutScreen
from tracegrad.store import ALL, RolloutFilter, Store, StoreUnavailable
from tracegrad.store.read import rollout_pages

SIZE = (100, 30)
HOSTILE = "[red]not markup[/] \x1b]0;title\x07 \x1b[31mred"


def add(store: Store, *numbers: int) -> None:
    """Named by when they were opened."""
    for number in numbers:
        store.append(rollout_events(f"r{number:03d}", task="t", at=1000.0 + number, turns=2))


def browser(store: Store, wanted: RolloutFilter = ALL, opened: str | None = None) -> RolloutBrowser:
    return RolloutBrowser(store, wanted, opened)


Pilots = Pilot[None]


async def listed(pilot: Pilots) -> list[str]:
    """The first word of each line: a rollout's id."""
    await settled(pilot)
    options = pilot.app.screen.query_one(OptionList)
    return [str(option.prompt).split()[0] for option in options.options]


async def status(pilot: Pilots) -> str:
    await settled(pilot)
    return str(pilot.app.screen.query_one(".status", Static).render())


async def text(pilot: Pilots) -> str:
    await settled(pilot)
    assert isinstance(pilot.app.screen, RolloutScreen)
    return "\n".join(strip.text for strip in pilot.app.screen.query_one(RichLog).lines)


async def settled(pilot: Pilots) -> None:
    """One worker may begin another."""
    await pilot.pause()
    while not all(worker.is_finished for worker in pilot.app.workers):
        await pilot.pause(0.005)
    await pilot.pause()


def names(numbers: Sequence[int]) -> list[str]:
    return [f"r{number:03d}" for number in numbers]


async def test_the_list_is_what_ls_prints_and_enter_opens_what_show_prints(store: Store) -> None:
    add(store, 1, 2, 3)
    async with browser(store).run_test(size=SIZE) as pilot:
        assert await listed(pilot) == names([3, 2, 1])
        assert await status(pilot) == "3 rollouts"
        await pilot.press("j", "enter")
        said = await text(pilot)
        assert said.splitlines()[0].split() == ["rollout", "r002"]
        await pilot.press("u")
        assert isinstance(pilot.app.screen, RolloutListScreen)
        await pilot.press("k", "enter")
        assert "r003" in await text(pilot)
        await pilot.press("escape", "q")
    assert pilot.app.return_code == 0


async def test_neighbours_are_those_that_pass_the_filter(store: Store) -> None:
    add(store, 1, 2, 3)
    store.append(rollout_events("other", task="u", at=1001.5, turns=1))
    async with browser(store, RolloutFilter(task="t"), "r003").run_test(size=SIZE) as pilot:
        for key, expected in (("n", "r002"), ("n", "r001"), ("n", "r001"), ("p", "r002")):
            await pilot.press(key)
            assert expected in await text(pilot)
        await pilot.press("u")
        assert await listed(pilot) == names([3, 2, 1])


async def test_tokens_and_whole_messages_are_shown_on_request(store: Store) -> None:
    store.append(every_sample())
    rows = store.rollouts(limit=None)
    longest = max(rows, key=lambda row: row.completion_tokens).rollout_id
    async with browser(store, opened=longest).run_test(size=SIZE) as pilot:
        plain = await text(pilot)
        await pilot.press("t")
        with_tokens = await text(pilot)
        assert len(with_tokens) > len(plain)
        await pilot.press("t")
        assert await text(pilot) == plain


async def test_what_is_new_is_counted_and_shown_when_its_reader_says_so(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_list_screen, "LOOK_S", 0.02)
    add(store, 1)
    async with browser(store).run_test(size=SIZE) as pilot:
        assert await listed(pilot) == names([1])
        add(store, 2, 3)
        for _ in range(500):
            if (await status(pilot)).startswith("2 new"):
                break
            await pilot.pause(0.01)
        assert await status(pilot) == "2 new: r shows them"
        assert await listed(pilot) == names([1])
        await pilot.press("r")
        assert await listed(pilot) == names([3, 2, 1])


async def test_older_ones_come_as_one_goes_down(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_list_screen, "PAGE", 10)
    add(store, *range(25))
    async with browser(store).run_test(size=SIZE) as pilot:
        assert await listed(pilot) == names(range(24, 14, -1))
        assert await status(pilot) == "10 rollouts, and older ones"
        await pilot.press("end")
        assert await listed(pilot) == names(range(24, 4, -1))
        await pilot.press("end")
        assert await listed(pilot) == names(range(24, -1, -1))
        assert await status(pilot) == "25 rollouts"
        await pilot.press("end", "enter")
        assert "r000" in await text(pilot)


async def test_the_list_ends_at_its_ends(store: Store) -> None:
    """A key that is held down must not lead back to the beginning."""
    add(store, 1, 2, 3)
    async with browser(store).run_test(size=SIZE) as pilot:
        await settled(pilot)
        options = pilot.app.screen.query_one(OptionList)
        for key, at in (("k", 0), ("j", 1), ("down", 2), ("j", 2), ("down", 2), ("up", 1)):
            await pilot.press(key)
            assert options.highlighted == at


async def test_a_search_that_takes_long_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page, and each look for a neighbour, goes through so many rollouts."""
    add(store, *range(1, 41))
    store.append(rollout_events("first", task="rare", at=1000.0, turns=1))
    store.append(rollout_events("last", task="rare", at=2000.0, turns=1))
    monkeypatch.setattr(rollout_pages, "_FIRST_LOOK", 5)
    monkeypatch.setattr(rollout_pages, "_SMALL_TASK", 0)
    for module, name in (
        (rollout_list_screen, "page_of_rollouts"),
        (rollout_screen, "next_rollout"),
    ):
        monkeypatch.setattr(module, name, partial(getattr(rollout_pages, name), search_s=-1.0))
    async with browser(store, RolloutFilter(task="rare")).run_test(size=SIZE) as pilot:
        assert await listed(pilot) == ["last", "first"]
        await pilot.press("enter", "n")
        assert "first" in (await text(pilot)).splitlines()[0]


@pytest.mark.parametrize(
    ("wanted", "said"), [(ALL, "no rollouts yet"), (RolloutFilter(task="x"), "no rollouts match")]
)
async def test_an_empty_list_says_so(store: Store, wanted: RolloutFilter, said: str) -> None:
    async with browser(store, wanted).run_test(size=SIZE) as pilot:
        assert await status(pilot) == said
        await pilot.press("enter", "j", "k")
        assert isinstance(pilot.app.screen, RolloutListScreen)


async def test_a_store_that_is_away_is_said_and_asked_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, 1)
    async with browser(store).run_test(size=SIZE) as pilot:
        assert await listed(pilot) == names([1])
        with monkeypatch.context() as patch:
            patch.setattr(rollout_list_screen, "page_of_rollouts", away)
            await pilot.press("r")
            assert await status(pilot) == "the database is away"
        await pilot.press("r")
        assert await status(pilot) == "1 rollout"


def away(*_: object, **__: object) -> None:
    raise StoreUnavailable("the database is away")


async def test_what_agents_say_is_text(store: Store) -> None:
    store.append(rollout_events("r1", task=HOSTILE, at=1000.0, turns=1))
    async with browser(store).run_test(size=SIZE) as pilot:
        options = pilot.app.screen.query_one(OptionList)
        await settled(pilot)
        assert "[red]not markup[/]" in str(options.get_option_at_index(0).prompt)
        await pilot.press("enter")
        said = await text(pilot)
        assert "[red]not markup[/]" in said
        assert "\x1b" not in said


async def test_it_is_drawn_again_for_another_width(store: Store) -> None:
    add(store, 1)
    async with browser(store, opened="r001").run_test(size=SIZE) as pilot:
        wide = await text(pilot)
        await pilot.resize_terminal(40, 30)
        narrow = await text(pilot)
        assert max(map(len, narrow.splitlines())) <= 40 < max(map(len, wide.splitlines()))


def test_a_pipe_is_told_what_to_use() -> None:
    done = CliRunner().invoke(app, ["ui"])
    assert done.exit_code == 2
    assert "ui needs a terminal; `tracegrad rollouts ls` and `show` write to pipes" in done.output
