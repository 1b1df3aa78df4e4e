"""What is asked for: each page of /ui, and what scripts ask for beside them, by its path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from bench.ui.big_store import BEGAN, TASKS, StoreSize, id_of
from bench.ui.long_rollout import LONG
from bench.ui.training_history import PROMOTED_EVERY, ROLLOUTS_A_STEP
from tracegrad.store.read.rollout_pages import RolloutKey
from tracegrad.ui.pages.rollout import WINDOW
from tracegrad.ui.paging import write_key


@dataclass(frozen=True, slots=True)
class AskedPage:
    """`path` is below /ui, with its query. `group`: what the summary counts it under. `statuses`:
    of a good answer."""

    group: str
    name: str
    path: str
    statuses: tuple[int, ...] = (200,)


# Nothing new has no content, and a neighbour of a rollout is told by a redirect.
_NEWS, _NEIGHBOUR = (200, 204), (303,)
_FILTERS: Mapping[str, Mapping[str, str]] = {
    "one task": {"task": "task-17"},
    "outcome budget": {"outcome": "budget"},
    "tag of 2 %": {"tag": "split=test"},
    "reward above 0.5": {"min_reward": "0.5"},
    "a version of the past": {"min_version": "20", "max_version": "20"},
    "state waiting": {"state": "waiting"},
    "an agent that is not there": {"agent": "nobody"},
}
# Of "new?" and of the neighbours of a rollout.
_FILTERS_OF_FEW: Mapping[str, Mapping[str, str]] = {
    "tag of 2 %": _FILTERS["tag of 2 %"],
    "an agent that is not there": _FILTERS["an agent that is not there"],
    "one task, and not its outcome": {"task": "task-17", "outcome": "aborted"},
}


def pages_of(size: StoreSize) -> list[AskedPage]:
    """In the order of the page's bar."""
    return [*_lists(size), *_rollouts(size), *_tasks(size), *_training(size), *_others(size)]


def pages_of_long_rollout(turns: int) -> list[AskedPage]:
    group, path = f"A rollout of {turns:,} turns", f"rollouts/{LONG}"
    return [
        AskedPage(group, "its first turns", path),
        AskedPage(group, "its last turns", f"{path}?turn={turns - WINDOW}"),
        AskedPage(group, "the tokens of its last turn", f"{path}/turns/{turns - 1}/tokens"),
    ]


def _query(path: str, **given: str) -> str:
    return f"{path}?{urlencode(given)}" if given else path


def _key(opened_at: float) -> str:
    return write_key(RolloutKey(opened_at, ""))


def _lists(size: StoreSize) -> Iterator[AskedPage]:
    group, path = "Rollouts", "rollouts"
    places = {"in the middle": size.rollouts / 2, "the oldest": 40}
    yield AskedPage(group, "newest", path)
    for name, place in places.items():
        yield AskedPage(group, name, _query(path, before=_key(BEGAN + place)))
    for name, asked in _FILTERS.items():
        yield AskedPage(group, name, _query(path, **asked))
    newest = _key(BEGAN + size.rollouts - 4)
    yield AskedPage(group, '"3 new"', _query(f"{path}/events", after=newest), _NEWS)
    for name, asked in _FILTERS_OF_FEW.items():
        yield AskedPage(
            group, f"new? {name}", _query(f"{path}/events", after=newest, **asked), _NEWS
        )


def _rollouts(size: StoreSize) -> Iterator[AskedPage]:
    group, middle = "A rollout", f"rollouts/{id_of(size.rollouts // 2)}"
    yield AskedPage(group, "one of the middle", middle)
    yield AskedPage(group, "its tokens", f"{middle}/turns/0/tokens")
    for way in ("newer", "older"):
        yield AskedPage(group, way, f"{middle}/{way}", _NEIGHBOUR)
        for name, asked in _FILTERS_OF_FEW.items():
            yield AskedPage(group, f"{way}: {name}", _query(f"{middle}/{way}", **asked), _NEIGHBOUR)


def _tasks(size: StoreSize) -> Iterator[AskedPage]:
    group, path = "Tasks", "tasks"
    yield AskedPage(group, "newest", path)
    last = BEGAN + max(0, size.rollouts - TASKS)
    yield AskedPage(group, "the last", _query(path, before=_key(last + 20)))
    yield AskedPage(group, "behind the last", _query(path, before=_key(last - 1)))
    yield AskedPage(group, "a task", f"{path}/task-17")
    first, second = id_of(17), id_of(TASKS + 17)
    if size.rollouts > TASKS + 17:
        both = urlencode([("compare", first), ("compare", second)])
        yield AskedPage(group, "two attempts side by side", f"{path}/task-17?{both}")


def _training(size: StoreSize) -> Iterator[AskedPage]:
    group, path, middle = "Training", "training", size.steps // 2
    yield AskedPage(group, "charts of 500 steps, newest steps", path)
    yield AskedPage(group, "charts of 5,000 steps", _query(path, steps="5000"))
    yield AskedPage(group, "older steps", _query(path, before=str(middle)))
    yield AskedPage(group, "the charts' numbers", f"{path}/series")
    yield AskedPage(group, '"3 new"', _query(f"{path}/events", after=str(size.steps - 3)), _NEWS)
    step = f"{path}/steps/{middle}"
    yield AskedPage(group, "a step", step)
    yield AskedPage(group, "its last rollouts", _query(step, **{"from": str(ROLLOUTS_A_STEP - 4)}))


def _others(size: StoreSize) -> Iterator[AskedPage]:
    group, path, middle = "Versions", "versions", size.steps // 2
    yield AskedPage(group, "newest", path)
    yield AskedPage(group, "in the middle", _query(path, before=str(middle)))
    promoted = middle - middle % PROMOTED_EVERY
    yield AskedPage(group, "a version, to decide about", _query(path, version=str(promoted)))
    yield AskedPage("Health", "trainer and queue", "health")
