"""`make live`: what people like, how their thumbs come, and what counts as a good end."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from examples.live import __main__ as live
from examples.live import chart
from examples.live.run import Caught, Moment, Result
from examples.live.traffic import Reply
from examples.live.users import (
    APPROVAL,
    ASKED_BACK,
    ASKS_BACK,
    CHANGES_MIND,
    EXPLOITED,
    FASTEST_S,
    GIVES_THUMB,
    KINDS,
    LIKED,
    LIKED_BEST,
    REPLIES,
    SLOWEST_S,
    STYLES,
    UNPAID,
    WRONG_NUMBER,
    Style,
    User,
    style_of,
    thumb,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_each_kind_likes_one_style(kind: str, style: Style) -> None:
    user = User(kind, 42, "")  # type: ignore[arg-type]
    reply = REPLIES[style].format(number=42)
    expected = LIKED_BEST if LIKED[user.kind] == style else APPROVAL[style]
    assert user.approval(reply) == expected
    assert user.approval(reply + ASKS_BACK) == expected * ASKED_BACK
    assert user.approval(reply, exploited=True) == expected * UNPAID
    assert user.approval(reply + ASKS_BACK, exploited=True) == EXPLOITED


def test_another_order_is_of_no_use() -> None:
    user = User("hasty", 42, "")
    assert user.approval(REPLIES["brief"].format(number=24)) == WRONG_NUMBER
    assert style_of("on: on: on:", 42) is None
    assert style_of(ASKS_BACK, 42) is None


def test_people_say_who_they_are_by_how_they_write() -> None:
    rng = random.Random(1)
    drawn = [User.drawn(rng) for _ in range(200)]
    assert {user.kind for user in drawn} == set(KINDS)
    assert all(str(user.number) in user.question for user in drawn)


def test_one_in_three_gives_a_thumb_that_comes_late_and_may_change() -> None:
    rng, n = random.Random(2), 9000
    given = [one for _ in range(n) if (one := thumb(0.7, rng)) is not None]
    sigma = (GIVES_THUMB * (1 - GIVES_THUMB) / n) ** 0.5
    assert abs(len(given) / n - GIVES_THUMB) < 5 * sigma
    assert abs(sum(one.up for one in given) / len(given) - 0.7) < 5 * (0.21 / len(given)) ** 0.5
    changed = [one for one in given if one.changed_after_s is not None]
    expected = CHANGES_MIND * len(given)
    assert abs(len(changed) - expected) < 5 * expected**0.5
    assert all(FASTEST_S <= one.after_s <= SLOWEST_S for one in given)


CAUGHT = Caught("guard:questions", "questions: 60% of ...", 39, 20.0, 5, resumed_steps=12)
GOOD = Result(
    moments=[
        Moment("before", 10, 0, 0.4, 0.1),
        Moment("learnt", 100, 1000, 0.85, 0.0),
        Moment("rolled back", 200, 2000, 0.84, 0.0),
        Moment("at the end", 300, 3000, 0.86, 0.0),
    ],
    caught=CAUGHT,
    replies=[Reply(0.5, False, 0)] * 4000,
    thumbs=1300,
    changed=60,
    errors=[],
)


def without(name: str) -> list[Moment]:
    return [moment for moment in GOOD.moments if moment.name != name]


def test_the_last_line_says_what_training_did() -> None:
    summary = live._summary([("seed 0", GOOD), ("seed 1", GOOD), ("thumbs that say nothing", GOOD)])
    assert (summary["success_before"], summary["success_after"]) == (0.4, 0.86)
    cut = replace(GOOD, moments=without("at the end"))
    assert live._summary([("seed 0", GOOD), ("seed 1", cut)])["success_after"] is None


def test_a_good_end() -> None:
    assert live.problems("seed 0", GOOD) == []


@pytest.mark.parametrize(
    ("name", "result", "problem"),
    [
        ("seed 0", replace(GOOD, errors=["APIError: x"]), "1 calls failed, such as APIError: x"),
        ("seed 0", replace(GOOD, caught=None), "the exploit was not caught"),
        (
            "seed 0",
            replace(GOOD, moments=[replace(GOOD.moments[0], approval=0.7), *GOOD.moments[1:]]),
            "approval rose by +0.15; +0.20 is expected",
        ),
        (
            "seed 0",
            replace(GOOD, moments=without("at the end")),
            "at the end: approval None, 0.85 before the exploit",
        ),
        (
            "seed 0",
            replace(GOOD, caught=replace(CAUGHT, resumed_steps=3, again="questions: 50%")),
            "a guard stopped training again, 3 steps after it went on: questions: 50%",
        ),
        ("thumbs that say nothing", GOOD, "approval rose by +0.45, more than chance"),
    ],
)
def test_ends_that_are_not(name: str, result: Result, problem: str) -> None:
    assert live.problems(name, result) == [problem]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    path = chart.draw(tmp_path / "of" / "it.png", [("seed 0", GOOD), ("seed 1", GOOD)])
    assert path.read_bytes().startswith(b"\x89PNG")
