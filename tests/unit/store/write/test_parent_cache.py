"""What is remembered of the latest turns: enough to read nothing, and no more than allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from sqlalchemy import Connection

from support.store.events import make_turn
from tracegrad.events import Turn
from tracegrad.store import Store
from tracegrad.store.write.parent_cache import RECENT_TURNS, ParentCache, ParentInfo

pytestmark = pytest.mark.databases("sqlite")  # what is in memory


def context(turn: str, rollout: str) -> ParentInfo:
    return ParentInfo(turn, rollout, 1, b"", None)


@contextmanager
def no_reading() -> Iterator[Connection]:
    raise AssertionError("it was read")
    yield


def turns(rollout: str, *parents: str | None) -> list[Turn]:
    return [replace(make_turn("x", rollout), parent_id=parent) for parent in parents]


@pytest.mark.databases("sqlite", "postgres")
def test_a_conversation_is_continued_without_reading(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_turn("t0")
    store.append([root])
    monkeypatch.setattr(store, "reading", no_reading)
    store.append([make_turn("t1", parent=root)])
    store.append([make_turn("fork"), make_turn("other", "s")])
    with pytest.raises(AssertionError, match="it was read"):
        store.append([make_turn("child", parent=make_turn("elsewhere"))])


def test_the_latest_of_a_rollout_come_newest_first() -> None:
    contexts = ParentCache()
    contexts.remember(context(f"t{n}", "r") for n in range(20))
    latest = contexts.lookup(turns("r", None), no_reading).recent["r"]
    assert [one.turn_id for one in latest] == [f"t{n}" for n in range(19, 19 - RECENT_TURNS, -1)]


def test_memory_is_bounded_by_forgetting_the_rollouts_not_written_longest() -> None:
    contexts = ParentCache(most=100)
    for rollout in range(50):
        contexts.remember(context(f"{rollout}.{n}", str(rollout)) for n in range(10))
        contexts.remember([context("first", "kept")])
    assert contexts.size <= 100
    assert "49.9" in contexts.lookup(turns("49", "49.9"), no_reading).turns
    assert "first" in contexts.lookup(turns("kept", "first"), no_reading).turns
    with pytest.raises(AssertionError, match="it was read"):
        contexts.lookup(turns("1", "1.0"), no_reading)
    contexts.forget(str(rollout) for rollout in [*range(50), "kept", "nobody"])
    assert contexts.size == 0


def test_memory_that_becomes_smaller_forgets_at_once() -> None:
    contexts = ParentCache()
    for rollout in range(50):
        contexts.remember(context(f"{rollout}.{n}", str(rollout)) for n in range(10))
    contexts.keep(100)
    assert contexts.size == 100
    assert "49.9" in contexts.lookup(turns("49", "49.9"), no_reading).turns
    contexts.remember([context("next", "next")])
    assert contexts.size == 91


@pytest.mark.databases("sqlite", "postgres")
def test_turns_that_are_not_in_memory_are_read(store: Store) -> None:
    store.remember_turns(2)
    roots = [make_turn(f"root-{n}", f"r{n}") for n in range(5)]
    for root in roots:
        store.append([root])
    for root in roots:
        store.append([make_turn(f"child of {root.turn_id}", root.rollout_id, parent=root)])
    assert [len(store.rollout_turns(root.rollout_id)) for root in roots] == [2] * 5


def test_one_endless_rollout_is_remembered_by_its_latest_turns() -> None:
    contexts = ParentCache()
    for n in range(5_000):
        contexts.remember([context(f"t{n}", "r")])
    assert contexts.size < 300
    assert "t4999" in contexts.lookup(turns("r", "t4999"), no_reading).turns


def test_what_was_read_before_a_removal_is_not_remembered_after_it() -> None:
    contexts = ParentCache()
    contexts.remember([context("old", "r")])
    contexts.invalidate_before(3)
    contexts.remember([context("late", "r")], as_of=0)
    assert contexts.size == 0
    contexts.remember([context("new", "r")], as_of=3)
    contexts.invalidate_before(2)  # whoever says that is behind
    assert "new" in contexts.lookup(turns("r", "new"), no_reading).turns
