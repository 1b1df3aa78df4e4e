"""Patterns that have fitted no turn so far, over several batches."""

from __future__ import annotations

from support.trainer.row_samples import turn
from tracegrad.turn_scopes import TurnScope
from tracegrad_trainer.batches import BatchSettings
from tracegrad_trainer.batches.pattern_watch import PatternWatch


def look(watch: PatternWatch, *agents: str) -> list[str]:
    """What is new of a batch of a turn of each."""
    turns = [turn(name, [1], [2]) for name in agents]
    return list(map(str, watch.look(turns, {name: TurnScope(name) for name in agents})))


def lines(patterns: list[str], there: str) -> list[str]:
    return [f"batches.agents = {one!r} fits no turn; there are: {there}" for one in patterns]


def test_each_is_said_once_and_no_more_where_it_fits() -> None:
    watch = PatternWatch(BatchSettings(agents=("writter", "planner", "!judge")))
    assert look(watch) == []
    assert watch.unfitted == [], "nothing was looked at"
    assert look(watch, "editor") == lines(["writter", "planner", "!judge"], "'editor'")
    assert watch.unfitted == ["batches.agents"]
    assert look(watch, "planner") == []
    assert watch.unfitted == []
    left = lines(["writter", "!judge"], "'editor', 'planner'")
    assert list(watch.unmatched.values()) == left
    assert look(watch, "editor") == []
    assert list(watch.unmatched.values()) == left, "one that has fitted once is right"


def test_names_that_agents_choose_do_not_fill_the_memory() -> None:
    watch = PatternWatch(BatchSettings(agents=("writter",)))
    for batch in range(5):
        look(watch, *(f"{batch} {number}" for number in range(50)))
    [line] = watch.unmatched.values()
    assert line.endswith("and 95 more")
