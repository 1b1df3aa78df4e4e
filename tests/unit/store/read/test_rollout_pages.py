"""Pages of rollouts, what is new and neighbours: each is looked for in a bounded time."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, event

from tracegrad.events import RolloutStarted
from tracegrad.store import RolloutFilter, Store
from tracegrad.store.read import rollout_pages
from tracegrad.store.read.rollout_pages import (
    Neighbour,
    NewerCount,
    RolloutKey,
    count_newer,
    next_rollout,
    page_of_rollouts,
)


def open_rollouts(store: Store, numbers: range, **more: object) -> None:
    store.append(
        [
            RolloutStarted(rollout_id=f"r{n:05}", task_id=f"t{n % 7}", opened_at=1000.0 + n, **more)  # type: ignore[arg-type]
            for n in numbers
        ]
    )


def test_rollouts_of_one_moment_are_all_paged_through(store: Store) -> None:
    store.append([RolloutStarted(rollout_id=f"r{n:03}", opened_at=5.0) for n in range(25)])
    seen: list[str] = []
    key = None
    with store.reading() as connection:
        while True:
            page = page_of_rollouts(connection, RolloutFilter(), before=key, limit=4)
            seen += [row.rollout_id for row in page.rows]
            if not page.more:
                break
            key = RolloutKey(5.0, seen[-1])
    assert seen == [f"r{n:03}" for n in reversed(range(25))]


def test_a_search_that_few_pass_says_how_far_it_came_and_goes_on(store: Store) -> None:
    open_rollouts(store, range(1, 3000))
    store.append([RolloutStarted(rollout_id="rare", agent="rare", opened_at=1000.0)])
    wanted = RolloutFilter(agent="rare")
    with store.reading() as connection:
        # No time at all: one look.
        page = page_of_rollouts(connection, wanted, limit=10, search_s=0.0)
        assert not page.rows
        assert page.more
        looks = 1
        while not page.rows:
            assert page.searched_to is not None
            key = RolloutKey(page.searched_to, "")
            page = page_of_rollouts(connection, wanted, before=key, limit=10, search_s=0.0)
            looks += 1
        assert [row.rollout_id for row in page.rows] == ["rare"]
        assert looks > 3
        whole = page_of_rollouts(connection, wanted, limit=10, clock=lambda: 0.0)
        assert [row.rollout_id for row in whole.rows] == ["rare"]
        assert not whole.more


def test_more_of_one_moment_than_a_search_looks_at_do_not_stop_it(store: Store) -> None:
    store.append([RolloutStarted(rollout_id=f"r{n:05}", opened_at=5.0) for n in range(1500)])
    store.append([RolloutStarted(rollout_id="old", agent="rare", opened_at=4.0)])
    key, found = None, list[str]()
    with store.reading() as connection:
        for _ in range(10):
            page = page_of_rollouts(
                connection, RolloutFilter(agent="rare"), before=key, limit=9, search_s=0.0
            )
            found += [row.rollout_id for row in page.rows]
            if page.searched_to is None:
                break
            key = RolloutKey(page.searched_to, "")
    assert found == ["old"]


def key_of(number: int) -> RolloutKey:
    return RolloutKey(1000.0 + number, f"r{number:05}")


def search_whole(
    connection: Connection, wanted: RolloutFilter, key: RolloutKey, *, newer: bool
) -> tuple[str | None, int]:
    """The neighbour, and how many looks of one search each it took."""
    looks = 0
    while True:
        looks += 1
        found = next_rollout(connection, wanted, key, newer=newer, search_s=0.0)
        if found.searched_to is None:
            return found.rollout_id, looks
        assert found.rollout_id is None
        key = RolloutKey(found.searched_to, "")


def test_a_neighbour_is_looked_for_step_by_step_both_ways(store: Store) -> None:
    open_rollouts(store, range(1, 3000))
    store.append(
        [RolloutStarted(rollout_id=f"rare{n}", agent="rare", opened_at=n) for n in (1.0, 9999.0)]
    )
    rare, task = RolloutFilter(agent="rare"), RolloutFilter(task="t3")
    with store.reading() as connection:
        oldest = RolloutKey(1.0, "rare1.0")
        newest = RolloutKey(9999.0, "rare9999.0")
        assert search_whole(connection, rare, oldest, newer=True) == ("rare9999.0", 6)
        assert search_whole(connection, rare, newest, newer=False) == ("rare1.0", 6)
        assert search_whole(connection, rare, newest, newer=True) == (None, 1)
        assert search_whole(connection, rare, oldest, newer=False) == (None, 1)
        everything = next_rollout(connection, rare, oldest, newer=True, clock=lambda: 0.0)
        assert everything == Neighbour("rare9999.0")
        for wanted, apart in ((RolloutFilter(), 1), (task, 7)):
            here = key_of(1018)  # 1018 % 7 == 3
            newer = next_rollout(connection, wanted, here, newer=True)
            older = next_rollout(connection, wanted, here, newer=False)
            assert newer == Neighbour(f"r{1018 + apart:05}")
            assert older == Neighbour(f"r{1018 - apart:05}")


def test_what_is_newer_is_counted_as_far_as_there_is_time(store: Store) -> None:
    open_rollouts(store, range(2000))
    rare = RolloutFilter(agent="rare")
    with store.reading() as connection:
        assert count_newer(connection, rare, None, most=9, search_s=0.0) == NewerCount(0, False)
        assert count_newer(connection, rare, None, most=9, clock=lambda: 0.0) == NewerCount(0, True)
        # Of what came since, and of no other.
        assert count_newer(connection, rare, key_of(1900), most=9, search_s=0.0).complete
        for wanted in (RolloutFilter(), RolloutFilter(since=1.0), RolloutFilter(task="t3")):
            found = count_newer(connection, wanted, key_of(1989), most=100)
            assert found.count == (2 if wanted.task else 10), wanted
        assert count_newer(connection, RolloutFilter(), None, most=9) == NewerCount(9, True)


def test_of_a_task_with_many_rollouts_only_some_are_looked_at(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_pages, "_SMALL_TASK", 100)
    open_rollouts(store, range(1400))
    store.append([RolloutStarted(rollout_id="t9", task_id="t9", opened_at=1.0)])
    said: list[str] = []
    with store.reading() as connection:
        event.listen(connection, "before_cursor_execute", lambda *args: said.append(args[2]))
        rare = RolloutFilter(task="t3", agent="rare")
        assert page_of_rollouts(connection, rare, limit=9, search_s=0.0).searched_to is not None
        assert not count_newer(connection, rare, None, most=9, search_s=0.0).complete
        found = next_rollout(connection, rare, key_of(1399), newer=False, search_s=0.0)
        assert found.searched_to is not None
        # A small one's are read at once, however far apart they are.
        small = RolloutFilter(task="t9")
        assert page_of_rollouts(connection, small, limit=9, search_s=0.0).searched_to is None
        # Where few moments are looked at, no database may begin with all of a task.
        looks = [text for text in said if "opened_at >=" in text and "task_id" in text]
        assert looks
        assert all("rollouts.task_id ||" in text for text in looks)
