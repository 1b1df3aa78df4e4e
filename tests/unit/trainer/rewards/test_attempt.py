"""Attempts, pauses and rates, by clocks of the test's own."""

from __future__ import annotations

import asyncio

from tracegrad_trainer.rewards.attempt import AttemptFailed, AttemptPolicy, Attempts, RateLimit


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def run(policy: AttemptPolicy, *errors: AttemptFailed) -> Attempts[str]:
    async def attempt(number: int) -> str:
        if number < len(errors):
            raise errors[number]
        return f"result {number}"

    return asyncio.run(policy.run(attempt))


def policy(clock: Clock, retries: int) -> AttemptPolicy:
    limit = RateLimit(None, clock=lambda: clock.now, sleep=clock.sleep)
    return AttemptPolicy(retries, limit, asyncio.Semaphore(1), 1.0, clock.sleep)


def test_pauses_double_and_differ_by_chance() -> None:
    clock = Clock()
    made = run(policy(clock, 4), *[AttemptFailed(f"error {n}") for n in range(4)])
    assert (made.result, made.error, made.count) == ("result 4", None, 5)
    for pause, whole in zip(clock.slept, (1.0, 2.0, 4.0, 8.0), strict=True):
        assert whole / 2 <= pause <= whole


def test_the_last_error_is_the_reason() -> None:
    made = run(policy(Clock(), 1), AttemptFailed("first"), AttemptFailed("second"))
    assert (made.result, made.error, made.count) == (None, "second", 2)


def test_what_another_attempt_would_not_change_is_not_tried_again() -> None:
    clock = Clock()
    made = run(policy(clock, 5), AttemptFailed("no number", final=True))
    assert (made.error, made.count, clock.slept) == ("no number", 1, [])


def test_a_server_that_names_a_time_is_left_alone_for_it() -> None:
    clock = Clock()
    made = run(policy(clock, 1), AttemptFailed("busy", after_s=300.0))
    assert (made.result, made.count, clock.slept) == ("result 1", 2, [300.0])
    clock = Clock()
    run(policy(clock, 1), AttemptFailed("busy", after_s=1e9))
    assert clock.slept == [900.0], "but not for ever"


def test_while_a_server_wants_to_be_left_alone_no_other_attempt_is_lost_on_it() -> None:
    clock = Clock()
    one = policy(clock, 0)
    assert run(one, AttemptFailed("busy", after_s=300.0)).error == "busy"
    clock.now += 100.0
    assert run(one).result == "result 0"
    assert clock.slept == [200.0]
    assert run(one).result == "result 0"
    assert clock.slept == [200.0], "it is over"


def test_beginnings_are_spread_over_a_minute() -> None:
    clock = Clock()
    limit = RateLimit(30, clock=lambda: clock.now, sleep=clock.sleep)

    async def four() -> None:
        for _ in range(3):
            await limit.wait()
        clock.now += 60.0
        await limit.wait()

    asyncio.run(four())
    assert clock.slept == [2.0, 2.0], "the first at once, and one after a long while too"
