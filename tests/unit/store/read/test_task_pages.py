"""Pages of tasks by their newest rollout, and what of a task is looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.store.events import chain, make_turn, rollout_events
from tracegrad.events import Outcome, RolloutStarted
from tracegrad.store import Store
from tracegrad.store.filters import ALL
from tracegrad.store.read import task_pages
from tracegrad.store.read.attempts import iterate_attempts, load_attempts
from tracegrad.store.read.rollout_pages import RolloutKey
from tracegrad.store.read.task_health import Subject, subject_health
from tracegrad.store.read.task_pages import (
    AttemptCount,
    count_attempts,
    health_of_tasks,
    last_responses,
    newest_rollouts,
    newest_versions,
    page_of_tasks,
    summarize_newest,
)

Opened = tuple[str | None, float]  # a rollout's task, and when it was opened


def open_all(store: Store, rollouts: Sequence[Opened], prefix: str = "r") -> list[RolloutKey]:
    """In this order; several may be of one moment."""
    keys = [RolloutKey(at, f"{prefix}{n:05}") for n, (_, at) in enumerate(rollouts)]
    store.append(
        [
            RolloutStarted(rollout_id=key.rollout_id, task_id=task, opened_at=key.opened_at)
            for key, (task, _) in zip(keys, rollouts, strict=True)
        ]
    )
    return keys


def all_pages(store: Store, limit: int, search_s: float = math.inf) -> list[tuple[str, RolloutKey]]:
    """Every page, one behind the other."""
    found: list[tuple[str, RolloutKey]] = []
    before = None
    with store.reading() as connection:
        while True:
            page = page_of_tasks(connection, before=before, limit=limit, search_s=search_s)
            found += zip(page.task_ids, page.keys, strict=True)
            assert len(page.keys) <= limit
            if not page.more:
                return found
            if page.searched_to is not None:
                before = RolloutKey(page.searched_to, "")
            else:
                before = page.keys[-1]


def expected(
    rollouts: Sequence[Opened], keys: Sequence[RolloutKey]
) -> list[tuple[str, RolloutKey]]:
    """The newest of each task by plain Python, the newest first."""
    newest: dict[str, RolloutKey] = {}
    for (task, _), key in zip(rollouts, keys, strict=True):
        if task is not None:
            newest[task] = max(newest.get(task, key), key)
    return sorted(newest.items(), key=lambda each: each[1], reverse=True)


TASKS = st.sampled_from([None, "a", "b", "c/d", "é %", "t"])
MOMENTS = st.sampled_from([1.0, 2.0, 2.5, 3.0, 7.0])


_examples = iter(range(10**6))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rollouts=st.lists(st.tuples(TASKS, MOMENTS), max_size=30),
    limit=st.integers(1, 4),
    search_s=st.sampled_from([0.0, math.inf]),
)
def test_pages_have_every_task_once_by_its_newest_rollout(
    store: Store, rollouts: list[Opened], limit: int, search_s: float
) -> None:
    # The store is the same for all examples: each has tasks and moments of its own.
    example = next(_examples)
    own = [(None if task is None else f"{example}:{task}", at + example) for task, at in rollouts]
    keys = open_all(store, own, prefix=f"e{example}-")
    found = [one for one in all_pages(store, limit, search_s) if one[0].startswith(f"{example}:")]
    assert found == expected(own, keys)


def test_an_empty_store_has_no_task(store: Store) -> None:
    with store.reading() as connection:
        page = page_of_tasks(connection, limit=5)
        assert (page.task_ids, page.more, page.searched_to) == ([], False, None)
        assert newest_rollouts(connection, "t", 5) == []
        assert count_attempts(connection, "t") == AttemptCount(0, more=False)
        assert summarize_newest(connection, "t", 5) is None
        assert health_of_tasks(connection, []) == []
        assert load_attempts(connection, []) == []
        assert last_responses(connection, []) == {}


def test_a_page_that_took_its_time_says_how_far_it_came(store: Store) -> None:
    """One task has all of the newest rollouts."""
    open_all(store, [("rare", 0.5), *(("big", 1.0 + n) for n in range(2000))])
    with store.reading() as connection:
        page = page_of_tasks(connection, limit=5, search_s=0.0)
    assert page.task_ids == ["big"]
    assert page.more
    assert page.searched_to == 1501.0  # the first look goes through 500
    assert [task for task, _ in all_pages(store, 5, 0.0)] == ["big", "rare"]


def test_figures_are_of_the_newest_attempts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(10):
        outcome = None if n == 9 else Outcome.COMPLETED if n % 2 else Outcome.BUDGET
        reward = None if n == 8 else n / 8
        store.append(rollout_events(f"r{n}", task="t", at=float(n), outcome=outcome, reward=reward))
    store.append(rollout_events("other", task="t2", at=99.0))
    with store.reading() as connection:
        found = summarize_newest(connection, "t", 4)
        assert found is not None
        assert (found.last_rollout_id, found.last_opened_at) == ("r9", 9.0)
        assert dict(found.outcomes) == {"open": 1, "completed": 1, "budget": 2}
        assert found.rewards == [7 / 8, 6 / 8], "an open one says nothing yet"
        assert count_attempts(connection, "t") == AttemptCount(10, more=False)
        monkeypatch.setattr(task_pages, "MOST_COUNTED", 9)
        assert count_attempts(connection, "t") == AttemptCount(9, more=True)
        assert newest_rollouts(connection, "t", 2) == [RolloutKey(9.0, "r9"), RolloutKey(8.0, "r8")]


def test_attempts_of_ids_are_those_of_the_filter(store: Store) -> None:
    for n in range(6):
        outcome = Outcome.ENV_ERROR if n == 2 else Outcome.COMPLETED
        store.append(rollout_events(f"r{n}", at=float(n), version=n, outcome=outcome))
    store.append(rollout_events("bare", turns=0))
    ids = ["r1", "r2", "r3", "bare", "nobody"]
    with store.reading() as connection:
        every = {each.rollout_id: each for each in iterate_attempts(connection, ALL)}
        found = {each.rollout_id: each for each in load_attempts(connection, ids)}
        versions = newest_versions(connection, ids)
    assert found == {name: every[name] for name in ("r1", "r3")}
    assert versions == {"r1": 1, "r2": 2, "r3": 3}


def test_a_tasks_state_is_of_its_newest_attempts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `subject_health` has it, also where older ones are not looked at."""
    for n in range(30):
        task = ("fails", "varies")[n % 2]
        outcome = Outcome.ENV_ERROR if task == "fails" else Outcome.COMPLETED
        reward = None if task == "fails" else float(n % 3)
        store.append(
            rollout_events(f"r{n:02}", task=task, at=float(n), outcome=outcome, reward=reward)
        )
    ids = ["varies", "fails", "unknown"]
    with store.reading() as connection:
        whole = subject_health(connection, [Subject("task", one) for one in ids])
        assert [one.state for one in whole] == ["ok", "suspect", "ok"]
        assert health_of_tasks(connection, ids) == whole
        monkeypatch.setattr(task_pages, "_LOOKED_AT", 8)
        bounded = health_of_tasks(connection, ids)
        assert [one.state for one in bounded] == ["ok", "suspect", "ok"]
        assert bounded[1].why.startswith("the last 8 attempts failed")
        assert [one.tried_at for one in bounded] == [29.0, 28.0, None]
        monkeypatch.setattr(task_pages, "_LOOKED_AT", 7)
        assert [one.state for one in health_of_tasks(connection, ids)] == ["ok", "ok", "ok"]


def test_the_last_response_is_that_of_the_last_turn(store: Store) -> None:
    def reply(text: str) -> dict[str, object]:
        return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}

    store.append(rollout_events("r", turns=0))
    store.append([*chain("r", 3, response=lambda n: reply(f"said {n} " + "long " * 2000))])
    # The same long text: it is shared.
    store.append([make_turn("s.0", "s", response=reply("said 2 " + "long " * 2000))])
    store.append([make_turn("bare.0", "bare")])
    with store.reading() as connection:
        found = last_responses(connection, ["r", "s", "bare", "nobody"])
    assert found == {
        "r": reply("said 2 " + "long " * 2000),
        "s": reply("said 2 " + "long " * 2000),
        "bare": None,
    }
