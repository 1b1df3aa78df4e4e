"""A rollout follows its code into threads, and into no code that is another's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any

import httpx
import opentelemetry.trace
import pytest

from support.sdk.fake_proxy import FakeProxy
from tracegrad import context, rollout, tags, turn

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}]}


def ask(url: str) -> None:
    httpx.post(f"{url}/v1/chat/completions", json=ASK)


def here() -> str | None:
    current = context.current()
    return current.id if current else None


class Worker(threading.Thread):
    def __init__(self, task: Callable[[], None]) -> None:
        super().__init__()
        self._task = task

    def run(self) -> None:
        self._task()


def joined(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


def in_executor(task: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(task).result()


def mapped(task: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda _: task(), range(1)))


def in_a_loops_executor(task: Callable[[], None]) -> None:
    async def run() -> None:
        await asyncio.get_running_loop().run_in_executor(None, task)

    asyncio.run(run())


WAYS: list[Callable[[Callable[[], None]], None]] = [
    in_executor,
    mapped,
    in_a_loops_executor,
    lambda task: joined(threading.Thread(target=task)),
    lambda task: joined(Worker(task)),
    lambda task: joined(threading.Timer(0.0, task)),
    lambda task: joined(threading.Thread(target=in_executor, args=(task,))),
]


@pytest.mark.parametrize("run", WAYS)
def test_calls_of_a_thread_are_the_rollouts(
    proxy: FakeProxy, run: Callable[[Callable[[], None]], None]
) -> None:
    with rollout() as r, turn(state="s"):
        run(lambda: ask(r.url))
        ask(r.url)
    run(lambda: ask(r.url))
    inside, beside, after = proxy.chats
    for name in ("x-tracegrad-rollout", "x-tracegrad-state", "traceparent"):
        assert inside.headers[name] == beside.headers[name]
    assert inside.headers["x-tracegrad-rollout"] == r.id
    assert "x-tracegrad-rollout" not in after.headers


def test_what_an_executor_runs_is_the_submitters(proxy: FakeProxy) -> None:
    """Its one thread was started inside the first rollout."""
    with ThreadPoolExecutor(1) as pool:
        with rollout() as first:
            assert pool.submit(here).result() == first.id
            between = pool.submit(here)
        assert between.result() == first.id
        assert pool.submit(here).result() is None
        with rollout() as second, tags(k="v"):
            assert pool.submit(here).result() == second.id
            assert pool.submit(context.current_tags).result() == {"k": "v"}
        assert pool.submit(context.current_tags).result() == {}


def test_no_span_of_a_finished_rollout_is_left_in_a_pools_thread(proxy: FakeProxy) -> None:
    """What an HTTP client's instrumentation sends as `traceparent` decides whose a call is."""

    def trace_id() -> int:
        return opentelemetry.trace.get_current_span().get_span_context().trace_id

    with ThreadPoolExecutor(1) as pool:
        with rollout():
            first = pool.submit(trace_id).result()
            assert first == trace_id() != 0
        assert pool.submit(trace_id).result() == 0
        with rollout():
            assert pool.submit(trace_id).result() == trace_id() != first


def test_tags_of_a_finished_rollout_are_not_inherited(proxy: FakeProxy) -> None:
    ended, found = threading.Event(), []

    def work() -> None:
        found.append(context.current_tags())
        ended.wait(60)
        found.append(context.current_tags())
        with tags(own="1"):
            found.append(context.current_tags())

    with tags(split="heldout"), rollout():
        thread = threading.Thread(target=work)
        thread.start()
    ended.set()
    thread.join()
    assert found[1:] == [{}, {"own": "1"}]


def test_a_thread_that_outlives_its_rollout_is_nobodys(proxy: FakeProxy) -> None:
    questions: SimpleQueue[str] = SimpleQueue()
    answers: SimpleQueue[str | None] = SimpleQueue()

    def work() -> None:
        for _ in iter(questions.get, ""):
            answers.put(here())
        with rollout() as own:
            own.finish()
            answers.put(here() if own.id == here() else "another")

    with rollout() as r:
        thread = threading.Thread(target=work)
        thread.start()
        questions.put("during")
        assert answers.get(timeout=60) == r.id
    questions.put("after")
    assert answers.get(timeout=60) is None
    with rollout():
        questions.put("in another")
        assert answers.get(timeout=60) is None
    questions.put("")
    assert answers.get(timeout=60) not in (None, "another", r.id)
    thread.join()


def test_a_late_reward_of_a_thread_still_counts(proxy: FakeProxy) -> None:
    with rollout() as r:
        ended = threading.Event()

        def score() -> None:
            ended.wait(60)
            context.require().reward(1.0)

        thread = threading.Thread(target=score)
        thread.start()
    ended.set()
    thread.join()
    assert proxy.rewards() == [(1.0, "reward", None)]
    assert proxy.events("reward")[0]["rollout_id"] == r.id


def test_threads_stay_the_agents_own(proxy: FakeProxy) -> None:
    """Context variables are those of the thread; its run method and its errors are its own."""
    mine: ContextVar[str] = ContextVar("mine", default="unset")

    def fail() -> None:
        raise LookupError(mine.get())

    with rollout(), ThreadPoolExecutor(1) as pool:
        mine.set("outside")
        with pytest.raises(LookupError, match="unset"):
            pool.submit(fail).result()
        with pytest.raises(TypeError, match="positional argument"):
            pool.submit()  # type: ignore[call-arg]
        worker = Worker(lambda: None)
        joined(worker)
        assert "run" not in vars(worker)
        with pytest.raises(RuntimeError, match="only be started once"):
            worker.start()
