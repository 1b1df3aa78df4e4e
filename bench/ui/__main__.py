"""`python -m bench.ui`: how long the server takes for a page where there are a million rollouts,
and for one rollout of thousands of turns."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jinja2 import Environment

from bench.ui.big_store import BEGAN, TASKS, make_store
from bench.ui.long_rollout import LONG, add_long_rollout
from tracegrad.store import Store
from tracegrad.store.read.rollout_pages import RolloutKey
from tracegrad.ui.environment import make_environment, render
from tracegrad.ui.pages import rollout, rollouts, task, tasks, tokens
from tracegrad.ui.paging import write_key

LISTS: dict[str, dict[str, str]] = {
    "newest": {},
    "in the middle": {"before": "middle"},
    "the oldest": {"before": "oldest"},
    "one task": {"task": "task-17"},
    "outcome budget": {"outcome": "budget"},
    "tag of 2 %": {"tag": "split=test"},
    "reward above 0.5": {"min_reward": "0.5"},
    "a version of the past": {"min_version": "20", "max_version": "20"},
    "state waiting": {"state": "waiting"},
    "an agent that is not there": {"agent": "nobody"},
}
# Of "new?" and of the neighbours of a rollout.
FILTERS_OF_FEW: dict[str, dict[str, str]] = {
    name: LISTS[name] for name in ("tag of 2 %", "an agent that is not there")
} | {"one task, and not its outcome": {"task": "task-17", "outcome": "aborted"}}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rollouts", type=int, default=1_000_000)
    options.add_argument("--turns", type=int, default=5_000)
    options.add_argument("--repeats", type=int, default=20)
    options.add_argument("--folder", type=Path, default=Path(".cache/bench-ui"))
    given = options.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    environment = make_environment()
    path = given.folder / f"{given.rollouts}.db"
    print("| page | median ms | worst ms | CPU ms |\n|---|---:|---:|---:|")
    with make_store(path, given.rollouts) as store:
        for name, asked in LISTS.items():
            _report(
                f"list: {name}", _list(store, environment, asked, given.rollouts), given.repeats
            )
        _report_tasks(store, environment, given.rollouts, given.repeats)
        query = rollouts.read_query([])
        newest = write_key(RolloutKey(BEGAN + given.rollouts - 4, ""))
        _report("3 new?", lambda: rollouts.count_new(store, query, newest), given.repeats)
        _report_of_few(store, newest, given.rollouts, given.repeats)
        middle = f"{given.rollouts // 2:012x}{'0' * 20}"
        _report("a rollout", _rollout(store, environment, middle, 0), given.repeats)
    with Store.open(f"sqlite:///{given.folder}/long-{given.turns}.db") as store:
        add_long_rollout(store, given.turns)
        for where, first in (("first turns", 0), ("last turns", given.turns - rollout.WINDOW)):
            name = f"{given.turns:,} turns: {where}"
            _report(name, _rollout(store, environment, LONG, first), max(3, given.repeats // 4))
        last = given.turns - 1
        _report("tokens of a turn", lambda: tokens.tokens_view(store, LONG, last, 0, None),
                max(3, given.repeats // 4))  # fmt: skip


def _report_tasks(store: Store, environment: Environment, count: int, repeats: int) -> None:
    places = {
        "newest": None,
        "the last": write_key(RolloutKey(BEGAN + count - TASKS + 20, "")),
        "behind the last": write_key(RolloutKey(BEGAN + count / 2, "")),
    }
    for name, before in places.items():
        _report(f"tasks: {name}", _tasks(store, environment, before), repeats)
    first, second = (f"{number:012x}{'0' * 20}" for number in (17, TASKS + 17))
    _report("a task", _task(store, environment, []), repeats)
    _report(
        "a task, two attempts side by side", _task(store, environment, [first, second]), repeats
    )


def _tasks(store: Store, environment: Environment, before: str | None) -> Callable[[], object]:
    return lambda: render(environment, "tasks.html", **_FRAME, **tasks.list_values(store, before))


def _task(store: Store, environment: Environment, compared: list[str]) -> Callable[[], object]:
    def made() -> str:
        view = task.task_view(store, "task-17", task.read_success(None), compared, 0)
        return render(environment, "task.html", **_FRAME, **task.task_values(view, 0.5, []))

    return made


def _list(
    store: Store, environment: Environment, texts: dict[str, str], count: int
) -> Callable[[], object]:
    query = rollouts.read_query(texts.items())
    places = {"middle": BEGAN + count / 2, "oldest": BEGAN + 40}
    named = texts.get("before")
    before = write_key(RolloutKey(places[named], "")) if named else None

    def made() -> str:
        values = rollouts.list_values(store, query, before)
        return render(environment, "rollouts.html", **_FRAME, **values)

    return made


def _report_of_few(store: Store, newest: str, count: int, repeats: int) -> None:
    for name, asked in FILTERS_OF_FEW.items():
        query = rollouts.read_query(asked.items())
        for since, after in (("since the newest", newest), ("of all", None)):
            made = partial(rollouts.count_new, store, query, after)
            _report(f"new {since}? {name}", made, repeats)
        for number in (20, count // 2, count - 20):
            for way in ("newer", "older"):
                beside = f"{number:012x}{'0' * 20}"
                made_path = partial(
                    rollouts.neighbour_path, store, beside, query, newer=way == "newer"
                )
                _report(f"{way} than number {number:,}: {name}", made_path, repeats)


def _rollout(
    store: Store, environment: Environment, rollout_id: str, first: int
) -> Callable[[], object]:
    query = rollouts.read_query([])

    def made() -> str:
        view = rollout.rollout_view(store, rollout_id, first)
        values = rollout.rollout_values(view, query)
        return render(environment, "rollout.html", **_FRAME, **values)

    return made


_FRAME = {"navigation": (), "here": "/ui/rollouts", "csrf": "0", "logged_in": False}


def _report(name: str, make: Callable[[], object], repeats: int) -> None:
    make()
    seconds, busy = [], []
    for _ in range(repeats):
        began, cpu = time.perf_counter(), time.process_time()
        make()
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - cpu)
    figures = (statistics.median(seconds), max(seconds), statistics.median(busy))
    cells = " | ".join(f"{1e3 * figure:.0f}" for figure in figures)
    print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
