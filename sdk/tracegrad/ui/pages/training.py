"""Training as it goes: what holds it up, charts of the last steps, and the steps one by one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tracegrad.inspect.display_text import intake_text
from tracegrad.inspect.step_columns import columns_of
from tracegrad.store import Decision, StepHistory, Store
from tracegrad.store.ledger.intake import Intake
from tracegrad.store.types import StepRecord
from tracegrad.store.write.decisions import newest_decisions
from tracegrad.ui.pages.charts import draw_charts
from tracegrad.ui.paging import PAGE, WrongLink, link
from tracegrad.ui.security import BASE

PATH = f"{BASE}/training"
# Steps of the charts: where a link names none, the choices, and at most.
STEPS = 500
_CHOICES = (100, 500, 2_000, 5_000)
MOST_STEPS = 5_000


def path_of(step: int) -> str:
    """Where a step is shown."""
    return f"{PATH}/steps/{step}"


def read_steps(asked: int) -> int:
    """Of how many steps there are to be charts; 0: the link does not say. WrongLink: too many."""
    if asked > MOST_STEPS:
        raise WrongLink(f"steps: {asked:,} are too many for charts; at most {MOST_STEPS:,}")
    return asked or STEPS


@dataclass(frozen=True, slots=True)
class ListedStep:
    """A row of the table; a cell for each of its columns."""

    step: StepRecord
    href: str
    cells: list[str]


def training_values(store: Store, steps: int, before: int | None) -> dict[str, Any]:
    """What the template needs. `before`: the table alone, of the steps before that one."""
    history = StepHistory(store)
    found = history.page(PAGE + 1, before=before)
    shown, newest = found[:PAGE], history.newest()
    columns = columns_of([step.metrics for step in shown])
    values = {
        "rows": [
            ListedStep(one, path_of(one.step), [column.cell(one.metrics) for column in columns])
            for one in shown
        ],
        "columns": columns,
        "before": before,
        "older": link(PATH, [], before=str(shown[-1].step)) if len(found) > PAGE else None,
        "newest": link(PATH, _kept(steps)),
        "live": link(f"{PATH}/events", [], after=str(newest or 0)),
        "last": newest,
    }
    return values | (_charts(store, steps) if before is None else {})


def _charts(store: Store, steps: int) -> dict[str, Any]:
    """What stands above the table of the newest steps."""
    return {
        "standing": standing_of(store),
        "drawn": draw_charts(store, steps),
        "series": link(f"{PATH}/series", [], steps=str(steps)),
        "choices": [(count, link(PATH, _kept(count)), count == steps) for count in _CHOICES],
    }


def _kept(steps: int) -> list[tuple[str, str]]:
    return [] if steps == STEPS else [("steps", str(steps))]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where training stands, as far as the store says it. `refused`: the newest decision, if
    nothing was done about it. `drivers`: whether they may open rollouts; None: no trainer asked."""

    steps: int
    version: int | None
    failed: list[int]
    paused: Decision | None
    refused: Decision | None
    drivers: str | None


def standing_of(store: Store) -> Standing:
    with store.reading() as connection:
        decided = newest_decisions(connection, 1, acted=True)
    state = Intake(store).state()
    drivers = None
    if state.silent_for_s is not None:
        drivers = intake_text(
            paced=state.paced,
            rollouts=state.capacity.rollouts,
            reason=state.reason,
            silent_for_s=state.silent_for_s,
        )
    return Standing(
        steps=StepHistory(store).count(),
        version=store.current_version(),
        failed=store.failed_versions(),
        paused=store.training_pause(),
        refused=decided[0] if decided and decided[0].refused is not None else None,
        drivers=drivers,
    )


def series_json(store: Store, steps: int) -> str:
    """The charts' numbers. What is not finite is null: JSON has no NaN."""
    return json.dumps(draw_charts(store, steps).as_json(), allow_nan=False, separators=(",", ":"))


def new_steps(store: Store, after: int) -> str:
    """One line of JSON: the newest step, and how many there are after this one."""
    history = StepHistory(store)
    return json.dumps({"newest": history.newest() or 0, "new": history.count_after(after)})
