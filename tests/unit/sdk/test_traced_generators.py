"""Traced generators: a rollout of their own between the steps that others take them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from support.sdk.fake_proxy import FakeProxy
from tracegrad import context, reward, rollout, trace


@trace(task="count", reward=True)
def counting(n: int) -> Any:
    received = []
    for i in range(n):
        assert context.current() is not None
        try:
            received.append((yield i))
        except LookupError as error:
            received.append(str(error))
    return 0.5 if received else None


def test_a_generator_is_a_rollout_from_its_first_item_to_its_end(proxy: FakeProxy) -> None:
    numbers = counting(3)
    assert proxy.events() == [], "nothing happens before the first item"
    assert next(numbers) == 0
    assert context.current() is None, "the rollout stays inside the generator"
    assert numbers.send("x") == 1
    assert numbers.throw(LookupError("y")) == 2
    with pytest.raises(StopIteration) as stop:
        next(numbers)
    assert stop.value.value == 0.5
    assert proxy.rewards() == [(0.5, "reward", None)]
    assert proxy.ends() == [("completed", None)]


def test_a_generator_closed_early_is_aborted(proxy: FakeProxy) -> None:
    for number in counting(5):
        if number == 1:
            break  # the loop held the only reference: the generator is closed
    assert proxy.ends() == [("aborted", "GeneratorExit")]
    assert proxy.rewards() == []


def test_an_error_that_leaves_a_generator(proxy: FakeProxy) -> None:
    numbers = counting(5)
    next(numbers)
    with pytest.raises(ZeroDivisionError):
        numbers.throw(ZeroDivisionError("z"))
    assert proxy.ends() == [("agent_error", "ZeroDivisionError: z")]


def test_interleaved_generators_keep_apart(proxy: FakeProxy) -> None:
    @trace(task=lambda name: name)
    def two_steps(name: str) -> Iterator[str]:
        yield context.require().id
        with rollout(task=f"{name}-inner") as inner:  # stays open across a yield
            yield inner.id
            assert context.current() is inner
        yield context.require().id

    with rollout(task="outside") as outside:
        pass
    a, b = two_steps("a"), two_steps("b")
    mixed = [next(g) for g in (a, b, a, b, a, b)]
    assert mixed[0] == mixed[4] != mixed[1] == mixed[5]
    assert len({*mixed, outside.id}) == 5
    assert context.current() is None
    a.close()
    b.close()
    assert len(proxy.ends()) == 5


async def test_an_async_generator(proxy: FakeProxy) -> None:
    @trace(task="stream")
    async def stream(n: int) -> AsyncIterator[Any]:
        last = None
        for i in range(n):
            await asyncio.sleep(0)
            inside.add(context.require().id)
            try:
                last = yield (i, last)
            except LookupError as error:
                last = str(error)
        reward(0.75)

    inside: set[str] = set()
    assert [item async for item in stream(2)] == [(0, None), (1, None)]
    assert context.current() is None
    talk: Any = stream(3)
    assert await anext(talk) == (0, None)
    assert await talk.asend("x") == (1, "x")
    assert await talk.athrow(LookupError("y")) == (2, "y")
    await talk.aclose()
    assert len(inside) == 2
    assert proxy.rewards() == [(0.75, "reward", None)]
    assert proxy.ends() == [("completed", None), ("aborted", "GeneratorExit")]


async def test_an_async_generator_that_is_cancelled_or_left_behind(proxy: FakeProxy) -> None:
    @trace
    async def endless() -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(60)
        yield 2

    async def consume() -> None:
        async for _ in endless():
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def leave() -> None:
        async for _ in endless():
            return

    await leave()
    await asyncio.sleep(0.05)  # the loop closes what was left behind
    assert [outcome for outcome, _ in proxy.ends()] == ["aborted", "aborted"]


def test_a_generator_inside_a_rollout_is_a_span(proxy: FakeProxy) -> None:
    with rollout() as r:
        assert list(counting(2)) == [0, 1]
    assert [e["rollout_id"] for e in proxy.events("rollout_started")] == [r.id]
    assert sorted(span.name for span in proxy.spans()) == ["counting", "rollout"]


@pytest.mark.parametrize("declared", [True, float])
def test_an_async_generator_has_nothing_that_could_be_its_reward(declared: Any) -> None:
    async def steps() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(
        TypeError, match=r"reward=.*: steps is an async generator.*reward\(\.\.\.\)"
    ):
        trace(reward=declared)(steps)
    trace(reward=False)(steps)
