"""Ages, durations and counts as people read them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracegrad.text_format import (
    format_age,
    format_count,
    format_duration,
    format_elapsed,
    format_time,
    shorten_apart,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (0, "0 s"), (59.2, "59 s"), (60, "1 min"), (3599, "60 min"), (7300, "2 h")],
)
def test_an_age_is_in_its_longest_unit(seconds: float, text: str) -> None:
    assert format_elapsed(seconds) == text


def test_a_column_has_what_since_reads() -> None:
    ago = [5 * 60 + 20, 86_400 * 3 + 60]
    assert [format_age(time.time() - each) for each in ago] == ["5 min", "3 d"]
    assert [format_age(time.time() - each, compact=True) for each in ago] == ["5m", "3d"]
    assert format_age(time.time() + 900, compact=True) == "0s"


@pytest.mark.parametrize("moment", [1e300, -1e300, float("inf"), float("nan"), 1.7e12])
def test_a_time_of_no_calendar_is_a_text_too(moment: float) -> None:
    assert format_time(moment)
    assert format_age(moment)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.035, "35 ms"), (1.24, "1.2 s"), (119, "119.0 s"), (150, "2.5 min"), (9000, "2.5 h")],
)
def test_a_duration_keeps_two_figures(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_count_has_its_plural_and_separators() -> None:
    assert [format_count(n, "turn") for n in (0, 1, 1200)] == ["0 turns", "1 turn", "1,200 turns"]


PREFIX = "You answer questions about rivers. "


@pytest.mark.parametrize(
    ("texts", "width", "shown"),
    [
        (["short", "other"], 20, ["short", "other"]),
        (["the same", "the same"], 4, ["the…", "the…"]),
        (
            [PREFIX + "Which flows through Vienna?", PREFIX + "Which flows through Prague?"],
            24,
            ["You ans…Vienna?", "You ans…Prague?"],
        ),
        (
            [PREFIX + city + " is where?" for city in ("Linz", "Lienz", "Wien")],
            21,
            ["You an…Linz is where?", "You an…Lienz is wher…", "You an…Wien is where?"],
        ),
        # One is the beginning of the other.
        (
            [PREFIX + "Vienna", PREFIX + "Vienna and Linz"],
            20,
            ["You a…Vienna", "You a…Vienna and Li…"],
        ),
        # They part in two places, of which one is beyond what is shown.
        (
            [f"{PREFIX}{a}{'-' * 40}{b}" for a in "xy" for b in "pq"],
            18,
            ["You a…p", "You a…q", "You a…p", "You a…q"],
        ),
    ],
)
def test_texts_that_begin_alike_show_where_they_part(
    texts: list[str], width: int, shown: list[str]
) -> None:
    found = shorten_apart(texts, width)
    assert [found[text] for text in texts] == shown
    assert max(map(len, found.values())) <= width


@given(st.lists(st.text("ab …", max_size=60), max_size=8), st.integers(1, 40))
def test_shortened_texts_fit(texts: list[str], width: int) -> None:
    found = shorten_apart(texts, width)
    assert found.keys() == set(texts)
    assert all(len(short) <= width for short in found.values())
