"""Ages, durations and counts as people read them."""

from __future__ import annotations

import time

import pytest

from tracegrad.text_format import format_age, format_count, format_duration, format_elapsed


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.035, "35 ms"), (1.24, "1.2 s"), (119, "119.0 s"), (150, "2.5 min"), (9000, "2.5 h")],
)
def test_a_duration_keeps_two_figures(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_count_has_its_plural_and_separators() -> None:
    assert [format_count(n, "turn") for n in (0, 1, 1200)] == ["0 turns", "1 turn", "1,200 turns"]
