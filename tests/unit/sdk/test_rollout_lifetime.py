"""Where a rollout ends for what outlives it: tasks, pools, forked processes, lazy results."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.pool import ThreadPool
from typing import Any

import opentelemetry.trace
import pytest

from support.sdk.fake_proxy import FakeProxy
from tracegrad import context, decorators, rollout, tags, trace


def here() -> str | None:
    rollout = context.current()
    return None if rollout is None else rollout.id


async def test_a_task_that_outlives_its_rollout_is_nobodys(proxy: FakeProxy) -> None:
    """A worker that the first rollout happened to start serves all the others."""
    questions: asyncio.Queue[str] = asyncio.Queue()
    answers: asyncio.Queue[Any] = asyncio.Queue()

    @trace
    async def solve() -> str | None:
        return here()

    async def work() -> None:
        while await questions.get():
            span = opentelemetry.trace.get_current_span().get_span_context()
            answers.put_nowait((here(), await solve(), span.trace_id))

    with rollout() as outer:
        with rollout() as inner:
            worker = asyncio.create_task(work())
            questions.put_nowait("during")
            assert (await answers.get())[:2] == (inner.id, inner.id)
        questions.put_nowait("in the outer one")
        assert (await answers.get())[:2] == (outer.id, outer.id)
    questions.put_nowait("after")
    found, own, _ = await answers.get()
    assert found is None
    assert own not in (None, outer.id, inner.id), "a traced call there is a rollout of its own"
    questions.put_nowait("")
    await worker
    *inside, last = [span for span in proxy.spans() if span.name == "solve"]
    assert all(span.parent_span_id for span in inside)
    assert last.parent_span_id == b"", "its span is no child of a rollout that has ended"


async def test_a_reward_of_a_task_that_outlives_its_rollout_counts(proxy: FakeProxy) -> None:
    ended = asyncio.Event()

    async def score() -> None:
        await ended.wait()
        context.require().reward(1.0)

    with rollout() as r:
        task = asyncio.create_task(score())
    ended.set()
    await task
    assert [e["rollout_id"] for e in proxy.events("reward")] == [r.id]


async def test_a_rollout_that_was_left_elsewhere_holds_its_context_no_longer(
    proxy: FakeProxy,
) -> None:
    """As fixtures and dependencies of web frameworks are."""
    opened = rollout()
    first = opened.__enter__()
    assert here() == first.id
    await asyncio.create_task(opened.__aexit__(None, None, None))  # a copy of this context
    assert here() is None
    with rollout() as second:
        assert here() == second.id


def test_an_interrupt_while_a_rollout_begins_ends_it(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(decorators, "_span", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rollout().__enter__()
    assert here() is None
    assert proxy.ends() == [("aborted", "KeyboardInterrupt")]


def test_an_early_finish_ends_no_rollout(proxy: FakeProxy) -> None:
    with rollout() as r:
        r.finish("budget")
        assert here() == r.id


def test_a_thread_pool_made_before_the_rollout_follows_it(proxy: FakeProxy) -> None:
    with ThreadPool(2) as pool:
        with rollout() as r, tags(k="v"):
            expected = [r.id] * 4
            one = lambda _: here()  # noqa: E731
            assert pool.apply(here) == r.id
            assert pool.apply_async(here).get() == r.id
            assert pool.map(one, range(4)) == expected
            assert list(pool.imap(one, range(4), 2)) == expected
            assert list(pool.imap_unordered(one, range(4))) == expected
            assert pool.starmap(lambda *_: here(), [(1, 2)] * 4) == expected
        assert pool.apply(here) is None


def test_a_forked_worker_outlives_the_rollout_that_started_it(proxy: FakeProxy) -> None:
    """A pool that the first rollout made works for all the others."""
    with rollout() as outer:
        with rollout() as inner:
            pool = multiprocessing.get_context("fork").Pool(1)
            assert pool.apply(here) == inner.id
        assert pool.apply(here) == outer.id
    assert pool.apply(here) is None
    pool.terminate()
    pool.join()


def test_a_forked_child_that_leaves_a_rollout_does_not_end_it_for_its_parent(
    proxy: FakeProxy,
) -> None:
    opened = rollout()
    r = opened.__enter__()
    if (child := os.fork()) == 0:
        opened.__exit__(None, None, None)
        os._exit(0 if here() is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert here() == r.id
    opened.__exit__(None, None, None)


def test_a_rollout_is_copied_as_itself_and_goes_to_no_other_process(proxy: FakeProxy) -> None:
    with rollout() as r:
        assert copy.deepcopy({"state": r})["state"] is r
        assert copy.copy(r) is r
        with pytest.raises(TypeError, match=r"give another one env=rollout\.environ"):
            pickle.dumps(r)


def generator() -> Iterator[int]:
    yield 1


async def coroutine() -> int:
    return 1


@contextmanager
def manager() -> Iterator[int]:
    yield 1


@asynccontextmanager
async def async_manager() -> AsyncIterator[int]:
    yield 1


def close(returned: Any) -> None:
    if hasattr(returned, "close"):
        returned.close()


@pytest.mark.parametrize(
    ("returning", "kind"),
    [
        (generator, "generator"),
        (coroutine, "coroutine"),
        (manager, "GeneratorContextManager"),
        (async_manager, "AsyncGeneratorContextManager"),
    ],
)
def test_a_result_that_runs_after_the_rollout_is_warned_of_once(
    returning: Callable[[], Any],
    kind: str,
    proxy: FakeProxy,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decorators, "_warned_lazy", set())
    solve = trace(name="solve")(lambda: returning())
    with rollout():
        close(solve())  # a span: that is no loss
    assert "after its rollout has ended" not in caplog.text
    close(solve())
    close(solve())
    [said] = [line for line in caplog.messages if "after its rollout has ended" in line]
    assert f"@trace: solve returned a {kind}, which runs after" in said


async def test_an_object_whose_call_is_a_coroutine_is_one(proxy: FakeProxy) -> None:
    class Agent:
        async def __call__(self) -> str | None:
            await asyncio.sleep(0)
            return here()

    found = await trace(Agent())()
    [opened] = proxy.events("rollout_started")
    assert found == opened["rollout_id"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"task": 5}, "task: expected a non-empty string"),
        ({"name": ""}, "name: expected a non-empty string"),
        ({"agent": object}, "agent: expected a non-empty string"),
        ({"tags": "split"}, "tags: expected a mapping such as"),
        ({"tags": ["a"]}, "tags: expected a mapping such as"),
    ],
)
def test_a_wrong_argument_of_trace_is_said_where_it_is_written(
    wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        trace(**wrong)
