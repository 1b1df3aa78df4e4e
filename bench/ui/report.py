"""The page of `python -m bench.ui`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from bench.proxy.machine import description
from bench.tables import Goal, goal_table, markdown, number
from bench.ui.big_store import TASKS, StoreSize
from bench.ui.timing import Timing
from tracegrad.store.read.rollout_pages import SEARCH_S

GOAL_S = 0.1

_HEAD = """# Pages

Written by `python -m bench.ui`; do not edit. The application behind `/ui`, asked in its own process
over SQLite: from the request to the last byte, without network and browser. The store has
{rollouts:,} rollouts of one turn, of {tasks:,} tasks, and {steps:,} steps of a trainer with
{steps:,} versions; and there is one rollout of {turns:,} turns. Each round asks for every page in
turn, {rounds} rounds after one that does not count. Where a filter lets few rows pass, the
page looks for {search:.0f} ms, and says how far it came.

"""


def page(timings: Sequence[Timing], size: StoreSize, *, turns: int, rounds: int) -> str:
    head = _HEAD.format(
        rollouts=size.rollouts,
        tasks=TASKS,
        steps=size.steps,
        turns=turns,
        rounds=rounds,
        search=1e3 * SEARCH_S,
    )
    machine = "\n".join(f"- {line}" for line in description(["starlette", "jinja2", "sqlalchemy"]))
    rows = [_row(one) for one in timings]
    header = ["", "page", "median ms", "worst ms", "CPU ms", "KB"]
    return "\n".join(
        [
            f"{head}{machine}",
            f"- {time.strftime('%Y-%m-%d', time.gmtime())}",
            "",
            goal_table(goals(timings)),
            markdown(header, rows),
        ]
    )


def goals(timings: Sequence[Timing]) -> list[Goal]:
    """One a group: its slowest page, by the median."""
    groups: dict[str, list[Timing]] = {}
    for one in timings:
        groups.setdefault(one.page.group, []).append(one)
    return [_goal(group, every) for group, every in groups.items()]


def _goal(group: str, timings: Sequence[Timing]) -> Goal:
    slowest = max(timings, key=lambda one: one.median_s)
    return Goal(
        group,
        f"every page below {1e3 * GOAL_S:.0f} ms",
        f"{1e3 * slowest.median_s:.0f} ms at most ({slowest.page.name})",
        slowest.median_s < GOAL_S,
    )


def _row(one: Timing) -> list[str]:
    seconds = (one.median_s, max(one.seconds), statistics.median(one.cpu_s))
    figures = [number(1e3 * each) for each in seconds]
    return [one.page.group, one.page.name, *figures, number(one.size / 1e3)]
