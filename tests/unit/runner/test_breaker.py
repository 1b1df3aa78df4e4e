"""The breaker: most starts fail, so that nobody asks for more at once."""

from __future__ import annotations

import pytest

from tracegrad.runner.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker


def tried(breaker: Breaker, *came: bool, now: float = 0.0) -> None:
    for one in came:
        breaker.starting()
        breaker.started(one, now)


@pytest.mark.parametrize(
    ("came", "opens"),
    [
        ([False] * 4, False),
        ([False] * 5, True),
        ([True, True, False, False, False], True),
        ([True, True, True, False, False], False),
        ([True] * 5 + [False] * 5, False),
        ([True] * 10 + [False] * 6, True),
    ],
)
def test_it_opens_when_more_than_half_of_five_or_more_failed(came: list[bool], opens: bool) -> None:
    breaker = Breaker()
    tried(breaker, *came)
    assert breaker.may_start(0.0) is not opens
    assert breaker.opened == int(opens)


def test_after_its_pause_one_is_tried_and_the_pause_grows_until_one_comes() -> None:
    breaker = Breaker()
    tried(breaker, *[False] * 5)
    now, pause_s = 0.0, FIRST_PAUSE_S
    for _ in range(8):
        assert breaker.opens_at(now) == now + pause_s
        assert not breaker.may_start(now + 0.99 * pause_s)
        now += pause_s
        assert breaker.may_start(now)
        breaker.starting()
        assert not breaker.may_start(now), "one at a time"
        breaker.started(False, now)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    now += pause_s
    tried(breaker, True, now=now)
    assert breaker.may_start(now)
    tried(breaker, *[False] * 4, now=now)
    assert breaker.may_start(now), "what failed before it closed is forgotten"


def test_a_start_that_was_given_up_leaves_the_next_one_its_turn() -> None:
    breaker = Breaker()
    tried(breaker, *[False] * 5)
    breaker.starting()
    breaker.abandoned()
    assert breaker.may_start(FIRST_PAUSE_S)


def test_starts_under_way_when_it_opened_do_not_lengthen_the_pause() -> None:
    breaker = Breaker()
    tried(breaker, *[False] * 5)
    for _ in range(3):
        breaker.started(False, 1.0)
    assert breaker.opens_at(1.0) == FIRST_PAUSE_S
    breaker.started(True, 2.0)
    assert breaker.may_start(2.0), "one of them came"
