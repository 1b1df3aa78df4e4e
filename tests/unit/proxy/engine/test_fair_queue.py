"""Calls that wait: who goes first, who is turned away."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracegrad.proxy.engine.fair_queue import FairQueue, QueueFull

Key = str | None


class Crowd:
    """Calls in a line, and what became of each."""

    def __init__(self, longest: int) -> None:
        self.waiting = FairQueue(longest)
        self.went: list[tuple[Key, int]] = []
        self.refused: list[tuple[Key, int]] = []
        self.late: list[tuple[Key, int]] = []
        self._numbers: Counter[Key] = Counter()
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self, key: Key, seconds: float = 60) -> asyncio.Task[None]:
        number = self._numbers[key]
        self._numbers[key] += 1
        task = asyncio.create_task(self._wait(key, number, seconds))
        self._tasks.append(task)
        for _ in range(2):  # it joins; who must leave for it leaves
            await asyncio.sleep(0)
        return task

    async def done(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _wait(self, key: Key, number: int, seconds: float) -> None:
        try:
            await self.waiting.wait(key, seconds)
            self.went.append((key, number))
        except QueueFull:
            self.refused.append((key, number))
        except TimeoutError:
            self.late.append((key, number))


async def test_a_rollout_with_a_thousand_calls_does_not_hold_up_the_others() -> None:
    crowd = Crowd(5000)
    for _ in range(1000):
        await crowd.join("greedy")
    for name in "abc":
        await crowd.join(name)
        await crowd.join(name)
    crowd.waiting.release()
    await crowd.done()
    assert crowd.went[:4] == [("greedy", 0), ("a", 0), ("b", 0), ("c", 0)]
    assert crowd.went[4:8] == [("greedy", 1), ("a", 1), ("b", 1), ("c", 1)]
    assert crowd.went[8:] == [("greedy", number) for number in range(2, 1000)]
    assert len(crowd.waiting) == 0


async def test_in_a_full_line_the_greedy_rollout_makes_room() -> None:
    crowd = Crowd(10)
    for _ in range(12):
        await crowd.join("greedy")
    assert crowd.refused == [("greedy", 10), ("greedy", 11)]
    for name in "abcdefghi":
        await crowd.join(name)
    assert crowd.refused[2:] == [("greedy", number) for number in range(9, 0, -1)]
    await crowd.join("j")
    assert crowd.refused[-1] == ("j", 0), "each has one place, and there is no eleventh"
    await crowd.join("a")
    assert crowd.refused[-1] == ("a", 1)
    crowd.waiting.release()
    await crowd.done()
    assert crowd.went == [("greedy", 0), *((name, 0) for name in "abcdefghi")]


async def test_calls_without_a_name_count_as_one_rollout() -> None:
    crowd = Crowd(100)
    for key in (None, None, None, "a", "a"):
        await crowd.join(key)
    crowd.waiting.release()
    await crowd.done()
    assert crowd.went == [(None, 0), ("a", 0), (None, 1), ("a", 1), (None, 2)]


async def test_who_waited_too_long_or_left_makes_room() -> None:
    crowd = Crowd(2)
    late = await crowd.join("a", seconds=0.01)
    gone = await crowd.join("b")
    await late
    assert crowd.late == [("a", 0)]
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert len(crowd.waiting) == 0
    await crowd.join("c")
    await crowd.join("c")
    crowd.waiting.release()
    await crowd.done()
    assert crowd.went == [("c", 0), ("c", 1)]
    assert crowd.refused == []


async def test_leaving_at_the_moment_of_release_costs_nobody_a_place() -> None:
    crowd = Crowd(2)
    gone = await crowd.join("a")
    await crowd.join("b")
    crowd.waiting.release()
    gone.cancel()
    await crowd.done()
    assert crowd.went == [("b", 0)]
    gone = await crowd.join("a")
    gone.cancel()
    crowd.waiting.release()
    await crowd.done()
    assert len(crowd.waiting) == 0


async def test_nobody_waits_where_there_are_no_places() -> None:
    with pytest.raises(QueueFull):
        await FairQueue(0).wait("a", 60)


@settings(deadline=None)
@given(
    longest=st.integers(1, 6), keys=st.lists(st.sampled_from(["a", "b", "c", None]), max_size=20)
)
def test_places_are_shared_out_evenly(longest: int, keys: list[Key]) -> None:
    async def run() -> Crowd:
        crowd = Crowd(longest)
        for key in keys:
            await crowd.join(key)
            assert len(crowd.waiting) <= longest
        crowd.waiting.release()
        await crowd.done()
        return crowd

    crowd = asyncio.run(run())
    assert len(crowd.went) == min(longest, len(keys))
    assert len(crowd.went) + len(crowd.refused) == len(keys)
    wanted, got = Counter(keys), Counter(key for key, _ in crowd.went)
    for key, count in got.items():
        # Within a rollout the oldest calls have the places, in order.
        assert [n for k, n in crowd.went if k == key] == list(range(count))
    for key in wanted:
        # Whoever got less than asked for is at most one behind anybody else.
        assert got[key] == wanted[key] or got[key] >= max(got.values()) - 1
