"""The pages that `python -m bench.ui` asks for, of a small store, and the table of their times."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.ui.big_store import StoreSize, make_store
from bench.ui.long_rollout import add_long_rollout
from bench.ui.pages import AskedPage, pages_of, pages_of_long_rollout
from bench.ui.report import page
from bench.ui.timing import Timing, timed
from starlette.routing import Route

from tracegrad.store import Store
from tracegrad.ui.app import make_ui
from tracegrad.ui.security import Sessions

SIZE = StoreSize(6_000, 12)


@pytest.fixture(scope="module")
def timings(tmp_path_factory: pytest.TempPathFactory) -> list[Timing]:
    folder = tmp_path_factory.mktemp("ui")
    with make_store(folder / "small.db", SIZE) as store:
        found = timed(store, pages_of(SIZE), 2)
    with Store.open(f"sqlite:///{folder}/long.db") as store:
        add_long_rollout(store, 60)
        return found + timed(store, pages_of_long_rollout(60), 2)


def test_every_page_is_asked_for_in_every_round(timings: list[Timing]) -> None:
    assert {one.page.group for one in timings} == {
        *("Rollouts", "A rollout", "Tasks", "Training", "Versions", "Health"),
        "A rollout of 60 turns",
    }
    assert all(len(one.seconds) == len(one.cpu_s) == 2 for one in timings)
    assert len({one.page.path for one in timings}) == len(timings)


def test_every_page_of_the_application_is_asked_for(timings: list[Timing], tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/store.db") as store:
        routes = make_ui(store, sessions=Sessions(None)).routes
    pages = [route for route in routes if isinstance(route, Route) and "GET" in route.methods]
    asked = {f"/{one.page.path.partition('?')[0]}" for one in timings}
    left = {route.path for route in pages if not any(map(route.path_regex.match, asked))}
    # Where one logs in, what leads to others, a script.
    assert left == {"/", "/login", "/session", "/feedback.js"}


def test_pages_show_what_the_store_has(timings: list[Timing]) -> None:
    sizes = {(one.page.group, one.page.name): one.size for one in timings}
    # A page of fifty rows, or of charts, is larger than one without any.
    empty = sizes["Tasks", "behind the last"]
    for full in (
        ("Rollouts", "newest"),
        ("Tasks", "newest"),
        ("Tasks", "two attempts side by side"),
        ("Training", "charts of 500 steps, newest steps"),
        ("Training", "a step"),
        ("Versions", "newest"),
    ):
        assert sizes[full] > 2 * empty, full


def test_the_slowest_page_of_a_group_is_held_against_the_goal() -> None:
    quick = Timing(AskedPage("Tasks", "newest", "tasks"), [0.01, 0.09, 0.5], [0.01] * 3)
    slow = Timing(AskedPage("Rollouts", "oldest", "rollouts"), [0.2, 0.2, 0.01], [0.01] * 3)
    made = page([quick, slow], SIZE, turns=60, rounds=3)
    assert "| Tasks | every page below 100 ms | 90 ms at most (newest) | yes |" in made
    assert "| Rollouts | every page below 100 ms | 200 ms at most (oldest) | **no** |" in made
    assert "| Tasks | newest | 90.0 | 500 | 10.0 | 0.00 |" in made


def test_a_page_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with (
        Store.open(f"sqlite:///{tmp_path}/store.db") as store,
        pytest.raises(RuntimeError, match="rollouts/nobody: 404"),
    ):
        timed(store, [AskedPage("Rollouts", "nobody", "rollouts/nobody")], 1)


def test_steps_need_rollouts() -> None:
    with pytest.raises(ValueError, match="too few for 100 steps"):
        StoreSize(3_000, 100)
