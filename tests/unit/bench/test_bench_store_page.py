"""From figures of the store to its page: what counts as met, and what is said to grow."""

from __future__ import annotations

import math

import pytest
from bench.store.batch import Batch
from bench.store.goals import at_ten_million, goals
from bench.store.growth import Growth, Operation
from bench.store.plans import Plan
from bench.store.report import page
from bench.store.rollouts import AGENT, LONG, SHORT
from bench.store.sizes import Common, Size
from bench.store.traffic import Cell, Rate, Traffic

APPEND, COUNTS = Operation("append", True), Operation("count", False)


def written(turns_per_s: float, threads: int = 64, place: str = "SQLite") -> Traffic:
    rate = Rate(turns_per_s, 5, 9, 0.4)
    return Traffic(place, Cell(SHORT, threads, 1, 1), rate, rate, rate)


def grown(*taken: float, last: int = 500_000) -> Growth:
    sizes = (1_000, 10_000, 100_000, last)
    return Growth(
        "SQLite",
        sizes,
        sizes,
        {APPEND: [taken], COUNTS: [(1, 1, 10, 50)]},
        9_000,
        (
            Plan("append", "SELECT … FROM turns", ("SEARCH turns",)),
            Plan("count", "SELECT … FROM ledger", ("SCAN ledger",)),
        ),
    )


@pytest.mark.parametrize(("rate", "met"), [(2_000, True), (1_999, False)])
def test_two_thousand_turns_a_second_are_asked_of_sqlite_at_64_writers(
    rate: float, met: bool
) -> None:
    found = goals([written(rate), written(1, 8), written(1, 64, "PostgreSQL")], [], [], [])
    assert [goal.met for goal in found] == [met]


@pytest.mark.parametrize(("grew", "met"), [(10_000, True), (10_001, False)])
def test_ten_bytes_a_unique_token_are_allowed_without_text(grew: int, met: bool) -> None:
    [goal] = goals([], [Size("SQLite", LONG, 20, 1_000, grew, 10**6)], [], [])
    assert goal.met is met


@pytest.mark.parametrize(("seconds", "met"), [(1.99, True), (2.0, False)])
def test_only_a_whole_batch_counts(seconds: float, met: bool) -> None:
    whole = Batch("SQLite", 256, 5_120, 10**6, 8_000, seconds, 2_500)
    part = Batch("SQLite", 16, 320, 10**5, 8_000, 9.0, 100)
    assert [goal.met for goal in goals([], [], [whole, part], [])] == [met]


def test_flat_is_told_by_fifty_times_as_many_turns_and_of_operations_on_turns_only() -> None:
    assert grown(9, 1, 1.2, 1.5).times(APPEND) == 1.5
    assert [goal.met for goal in goals([], [], [], [grown(9, 1, 1.2, 1.5)])] == [True]
    assert [goal.met for goal in goals([], [], [], [grown(0, 1, 1.2, 1.6)])] == [False]
    assert goals([], [], [], [grown(1, 1, 1, 9, last=200_000)]) == [], "too few to tell"


def test_a_slow_round_is_slow_for_all_sizes() -> None:
    growth = grown(9, 1, 1, 1.1)
    growth.rounds[APPEND] += [(9, 10, 10, 11), (9, 2, 2, 9)]
    assert growth.times(APPEND) == pytest.approx(1.1)
    assert growth.medians(APPEND) == [9, 2, 2, 9]


def test_ten_million_turns_are_a_straight_line_away_from_what_grows() -> None:
    assert at_ten_million(grown(1, 10, 100, 500), APPEND) == pytest.approx(10_000)


def test_what_is_flat_goes_on_with_the_logarithm() -> None:
    # From 10,000 to 500,000 is a factor of 50, from there to 10 million one of 20.
    log = math.log(20) / math.log(50)
    assert at_ten_million(grown(1, 2, 2, 2.5), APPEND) == pytest.approx(2.5 + 0.5 * log)
    assert at_ten_million(grown(1, 3, 2, 2), APPEND) == 2, "noise is no promise to get faster"


def test_the_page_has_every_figure_and_marks_what_grows() -> None:
    text = page(
        made=["today"],
        machine=["a machine"],
        traffic=[written(2_345), written(1_234, 8, "PostgreSQL")],
        sizes=[Size("SQLite", LONG, 20, 1_000, 4_560, 30_000)],
        shared=[Common("SQLite", AGENT, 48, 74_000, 31_000.0, 3_100.0)],
        batches=[Batch("SQLite", 256, 5_120, 10**6, 8_000, 1.25, 4_096)],
        growths=[grown(1, 1, 1, 1)],
    )
    assert "| SQLite | 64 | 2,345 | 5.00 | 9.00 | 0.40 |" in text
    assert "| PostgreSQL | 8 | 1,234 |" in text
    assert "5 turns) | 74.0 | 31.0 | 3.10 |" in text
    assert "| 4.56 | 0.23 | 1.50 |" in text
    assert "| 8,000 | 1.25 | 4,096 |" in text
    assert "**append**\n" in text
    assert "**count** (grows)" in text
    assert "SELECT … FROM ledger\nSCAN ledger" in text
    assert "| append, SQLite: 500,000 turns to 10,000 | at most 1.5 times" in text
