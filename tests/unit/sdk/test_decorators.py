"""Where rollouts begin and end: outcomes, rewards, tasks, and every kind of function."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tracegrad
from support.sdk.fake_proxy import FakeProxy
from tracegrad import Outcome, Reward, context, decorators, reward, rollout, trace

# --- rollout ---------------------------------------------------------------------------------


def test_a_rollouts_events_come_in_order(proxy: FakeProxy) -> None:
    with rollout(task="t1", tags={"split": "train", "epoch": 3}, agent="a", input={"q": 1}) as r:
        r.reward(0.5, turn=-1, name="format")
        reward(True)

    opened, first, second, finished = proxy.events()
    assert {k: v for k, v in opened.items() if k != "opened_at"} == {
        "type": "rollout_started",
        "rollout_id": r.id,
        "task_id": "t1",
        "agent": "a",
        "tags": {"split": "train", "epoch": "3"},
        "task": {"q": 1},
    }
    assert (first["value"], first["name"], first["turn"]) == (0.5, "format", -1)
    assert (second["value"], second["name"], second["turn"]) == (1.0, "reward", None)
    assert first["reward_id"] != second["reward_id"]
    assert (finished["type"], finished["outcome"]) == ("rollout_finished", "completed")
    assert {event["rollout_id"] for event in (opened, first, second, finished)} == {r.id}
    assert opened["opened_at"] <= first["given_at"] <= finished["finished_at"]
    assert not {"source", "created_at"} & first.keys(), "the proxy's to say"
    assert "recorded_at" not in finished
    assert (r.base_url, r.api_key) == (f"{proxy.url}/rollouts/{r.id}/v1", f"tg-{r.id}")


@pytest.mark.parametrize(
    ("error", "outcome", "text"),
    [
        (ValueError("no such tool"), "agent_error", "ValueError: no such tool"),
        (KeyboardInterrupt(), "aborted", "KeyboardInterrupt"),
        (SystemExit(0), "aborted", "SystemExit: 0"),
    ],
)
def test_what_leaves_a_rollout_decides_its_outcome_and_goes_on(
    proxy: FakeProxy, error: BaseException, outcome: str, text: str
) -> None:
    with pytest.raises(type(error)) as caught, rollout():
        raise error
    assert caught.value is error
    assert proxy.ends() == [(outcome, text)]


async def test_a_cancelled_rollout_is_aborted(proxy: FakeProxy) -> None:
    async def agent() -> None:
        async with rollout():
            await asyncio.sleep(60)

    task = asyncio.create_task(agent())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [outcome for outcome, _ in proxy.ends()] == ["aborted"]


def test_the_first_finish_stands(proxy: FakeProxy) -> None:
    with rollout() as r:
        r.finish(Outcome.BUDGET, "20 turns")
        r.finish("completed")
    assert proxy.ends() == [("budget", "20 turns")]


def test_a_reward_says_why_and_is_taken_back(proxy: FakeProxy) -> None:
    with rollout() as r:
        reward(0.5, comment="half of it")
        r.reward(1.0, turn=0, comment="x" * 20_000)
        r.withdraw_reward()
        with pytest.raises(ValueError, match="turn: expected an integer"):
            r.withdraw_reward(turn="last")  # type: ignore[arg-type]
    given = proxy.events("reward")
    placed = [(each["value"], each["turn"]) for each in given]
    assert placed == [(0.5, None), (1.0, 0), (None, None)]
    assert given[0]["comment"] == "half of it"
    assert 9_000 < len(given[1]["comment"]) <= 10_000
    assert "comment" not in given[2], "proxies of before refuse what they do not know"


def test_a_late_reward_still_counts(proxy: FakeProxy) -> None:
    with rollout() as r:
        pass
    r.reward(0.25)
    assert [event["type"] for event in proxy.events()][-2:] == ["rollout_finished", "reward"]


def test_rollouts_inside_each_other_are_two(proxy: FakeProxy) -> None:
    with rollout(task="outer") as outer:
        with rollout(task="inner") as inner:
            assert context.current() is inner
        assert context.current() is outer
    assert context.current() is None
    assert [e["task_id"] for e in proxy.events("rollout_started")] == ["outer", "inner"]


def test_tags_of_the_environment_of_the_scope_and_of_the_rollout(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEGRAD_TAGS", "run=7, split=env,who=env")
    with (
        tracegrad.tags(split="scope", who="scope"),
        tracegrad.tags({"a-b": 1}),
        rollout(tags={"who": "own"}),
    ):
        pass
    with rollout():
        pass
    first, second = (event["tags"] for event in proxy.events("rollout_started"))
    assert first == {"run": "7", "split": "scope", "a-b": "1", "who": "own"}
    assert second == {"run": "7", "split": "env", "who": "env"}


def held_out(proxy: FakeProxy) -> list[tuple[str | None, bool]]:
    return [(e["task_id"], e.get("held_out", False)) for e in proxy.events("rollout_started")]


def test_a_held_out_rollout_says_so_and_so_do_those_inside_of_it(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rollout("eval", held_out=True) as r, rollout("inside"):
        assert r.held_out
    with rollout("train"), rollout("eval-inside", held_out=True):
        pass
    monkeypatch.setenv("TRACEGRAD_HELD_OUT", "1")
    with rollout("process"):
        pass
    assert held_out(proxy) == [
        ("eval", True),
        ("inside", True),
        ("train", False),
        ("eval-inside", True),
        ("process", True),
    ]
    [plain] = [e for e in proxy.events("rollout_started") if e["task_id"] == "train"]
    assert "held_out" not in plain, "a proxy from before the mark takes it"
    monkeypatch.setenv("TRACEGRAD_HELD_OUT", "yes")
    with pytest.raises(ValueError, match="TRACEGRAD_HELD_OUT: 'yes'; write 1, or 0"):
        rollout().__enter__()


def test_trace_holds_out_by_its_arguments_and_where_it_cannot_tell(
    proxy: FakeProxy, caplog: pytest.LogCaptureFixture
) -> None:
    @trace(task=lambda question: question, held_out=lambda question: question.startswith("exam"))
    def solve(question: str) -> None:
        pass

    @trace(task="broken", held_out=lambda: 1 / 0)
    def broken() -> None:
        pass

    solve("exam-1")
    solve("drill-1")
    broken()
    assert held_out(proxy) == [("exam-1", True), ("drill-1", False), ("broken", True)]
    assert "held_out of @trace failed" in caplog.text
    with pytest.raises(ValueError, match="held_out: expected True or False, got 'no'"):
        trace(held_out="no")  # type: ignore[call-overload]


class _NoNumber:
    def __float__(self) -> float:
        raise KeyError("x")

    __repr__ = __float__  # type: ignore[assignment]


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("-inf"), 1e308, -1_000_000.1, "0.5", None, [1.0]),
        *(10**400, 10**5000, _NoNumber()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_reward_is_dropped_and_counted(
    proxy: FakeProxy, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    with rollout() as r:
        reward(value)
        reward(value, turn=0)
    assert not r.rewarded
    assert proxy.rewards() == []
    counted = [int(found) for found in re.findall(r"is dropped \((\d+) so far\)", caplog.text)]
    assert len(counted) == 2
    assert counted[1] == counted[0] + 1
    assert "value: expected a finite number from -1,000,000 to 1,000,000, got " in caplog.text


@pytest.mark.parametrize("value", [1e6, -1e6, 0, True])
def test_a_reward_within_bounds_is_given(proxy: FakeProxy, value: float) -> None:
    with rollout():
        reward(value)
    assert [given for given, *_ in proxy.rewards()] == [value]


def test_wrong_arguments_name_their_field(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rollout() as r:
        with pytest.raises(ValueError, match="turn: expected an integer"):
            r.reward(1, turn=0.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="name: expected a non-empty"):
            r.reward(1, name="")
        with pytest.raises(ValueError, match=r"outcome: expected one of completed, .*'done'"):
            r.finish("done")
    with pytest.raises(ValueError, match="task: expected a non-empty string"):
        rollout(task={"q": 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="@trace: expected a function"):
        trace(int)
    monkeypatch.setenv("TRACEGRAD_TAGS", "train")
    with pytest.raises(ValueError, match="TRACEGRAD_TAGS: 'train' is not key=value"):
        rollout().__enter__()
    monkeypatch.setenv("TRACEGRAD_TAGS", "")
    monkeypatch.setenv("TRACEGRAD_URL", "http://127.0.0.1:4141/v1")
    with pytest.raises(ValueError, match=r"TRACEGRAD_URL: .* without /v1"):
        rollout().__enter__()
    assert context.current() is None


def test_a_reward_outside_a_rollout_is_an_error_that_says_where_it_belongs() -> None:
    with pytest.raises(RuntimeError, match=r"no rollout is open here: call this inside .*@trace"):
        reward(1.0)


def test_one_rollout_object_is_one_attempt(proxy: FakeProxy) -> None:
    again = rollout()
    with again:
        pass
    with pytest.raises(RuntimeError, match="opened before"):
        again.__enter__()


# --- @trace ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "value"),
    [(0.5, 0.5), (True, 1.0), (2, 2.0), (np.float32(0.25), 0.25), ("0.5", None), (None, None)],
)
def test_a_returned_number_is_the_reward_where_that_is_declared(
    proxy: FakeProxy, returned: Any, value: float | None
) -> None:
    @trace(reward=True)
    def solve() -> Any:
        return returned

    assert solve() is returned
    assert proxy.rewards() == ([] if value is None else [(value, "reward", None)])


def test_an_answer_is_no_reward(proxy: FakeProxy) -> None:
    """42 may be what was asked for."""

    @trace
    def solve() -> int:
        return 42

    assert solve() == 42
    assert proxy.rewards() == []


def test_a_reward_is_returned_as_one_or_made_of_the_result(proxy: FakeProxy) -> None:
    @trace
    def solve() -> float:
        return Reward(0.5)

    @trace(reward=lambda answer: answer == "42")
    def answer() -> str:
        return "42"

    assert solve() == 0.5
    assert answer() == "42"
    assert proxy.rewards() == [(0.5, "reward", None), (1.0, "reward", None)]


def test_a_reward_that_is_neither_a_flag_nor_a_function_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match=r"reward: expected True, False or a function .*, got 0.5"):
        trace(reward=0.5)  # type: ignore[call-overload]


def test_a_given_reward_wins_over_a_returned_number(proxy: FakeProxy) -> None:
    @trace(reward=True)
    def add(a: int, b: int) -> int:
        reward(0.1, name="format")
        reward(0.2, turn=0)
        reward(1.0)
        return a + b

    assert add(2, 3) == 5
    assert (5.0, "reward", None) not in proxy.rewards()
    assert len(proxy.rewards()) == 3


def test_a_returned_nan_passes_through_and_is_no_reward(
    proxy: FakeProxy, caplog: pytest.LogCaptureFixture
) -> None:
    @trace(reward=True)
    def solve() -> float:
        return float("nan")

    assert np.isnan(solve())
    assert proxy.rewards() == []
    assert "is dropped" in caplog.text
    assert "value: expected a finite number from -1,000,000 to 1,000,000, got nan" in caplog.text


def test_nested_calls_share_the_rollout_and_only_the_outermost_scores(proxy: FakeProxy) -> None:
    seen = []

    @trace(reward=True)
    def tool(x: int) -> int:
        seen.append(context.require().id)
        return 100 * x

    @trace(agent="adder", tags={"k": 1}, task=lambda n: f"sum-{n}", reward=True)
    def solve(n: int) -> float:
        seen.append(context.require().id)
        assert tool(n) == 300
        return 1.0

    solve(3)
    (opened,) = proxy.events("rollout_started")
    assert seen == [opened["rollout_id"]] * 2
    assert (opened["agent"], opened["task_id"], opened["tags"]) == ("adder", "sum-3", {"k": "1"})
    assert opened["task"] == {"n": 3}
    assert proxy.rewards() == [(1.0, "reward", None)]


def _raises(n: int) -> str:
    raise KeyError(n)


class _Unreadable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def _asked_later(n: int) -> str:
    return f"sum-{n}"


class _Hostile:
    def __call__(self, n: int) -> str:
        raise RuntimeError("no")

    def __getattr__(self, name: str) -> object:
        raise (RuntimeError if name == "__qualname__" else AttributeError)(name)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (_raises, "_raises, called for test_x, raised KeyError: 3"),
        (lambda n: None, "<lambda>, called for test_x, returned None"),
        (lambda n: "", "<lambda>, called for test_x, returned ''"),
        (lambda n: _Unreadable(), "raised RuntimeError: no text"),
        (lambda: "t", "raised TypeError"),
        (lambda n: object(), "<lambda>, called for test_x, returned <object object at 0x"),
        (_asked_later, "_asked_later, called for test_x, returned <coroutine object"),
        (_Hostile(), "_Hostile, called for test_x, raised RuntimeError: no"),
    ],
)
def test_a_task_function_that_fails_leaves_the_rollout_without_a_task_and_says_so_once(
    proxy: FakeProxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    task: Callable[..., object],
    said: str,
) -> None:
    monkeypatch.setattr(decorators, "_warned_tasks", set())

    @trace(task=task, name="test_x", reward=True)
    def solve(n: int) -> int:
        return n

    assert [solve(3), solve(4)] == [3, 4]
    assert [event["task_id"] for event in proxy.events("rollout_started")] == [None, None]
    assert [value for value, *_ in proxy.rewards()] == [3, 4]
    [warned] = [each.message for each in caplog.records if "has no task" in each.message]
    assert said in warned


def test_a_traced_call_under_an_explicit_rollout_is_a_span_of_it(proxy: FakeProxy) -> None:
    @trace(reward=True)
    def count() -> int:
        return 42

    with rollout() as r:
        count()
        r.reward(1)
    assert len(proxy.events("rollout_started")) == 1
    assert proxy.rewards() == [(1.0, "reward", None)]


def test_equal_calls_are_one_task_and_others_are_not(proxy: FakeProxy) -> None:
    class Tool:
        """Its repr holds a memory address."""

    @trace
    def solve(question: str, tool: object = None, *, k: int = 2) -> None:
        pass

    solve("a", Tool())
    solve(question="a", tool=Tool(), k=2)
    solve("b", Tool())
    solve("a", Tool(), k=3)
    one, same, other, another = (e["task_id"] for e in proxy.events("rollout_started"))
    assert one == same
    assert len({one, other, another}) == 3
    assert len(one) == 16


def test_a_failing_call_fails_as_it_would_have(proxy: FakeProxy) -> None:
    @trace
    def solve(question: str) -> None:
        raise LookupError(question)

    with pytest.raises(LookupError, match="q"):
        solve("q")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'question'"):
        solve()  # type: ignore[call-arg]
    assert [outcome for outcome, _ in proxy.ends()] == ["agent_error"] * 2


def test_what_is_decorated_keeps_its_looks(proxy: FakeProxy) -> None:
    def plain(a: int, *, b: str = "x") -> float:
        """Doc."""
        return 0.0

    async def coroutine() -> None: ...
    def generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    for function in (plain, coroutine, generator, async_generator):
        traced = trace(function)
        assert inspect.signature(traced) == inspect.signature(function)
        assert (traced.__name__, traced.__doc__) == (function.__name__, function.__doc__)
    assert inspect.iscoroutinefunction(trace(coroutine))
    assert inspect.isgeneratorfunction(trace(generator))
    assert inspect.isasyncgenfunction(trace(async_generator))


def test_methods(proxy: FakeProxy) -> None:
    class Agent:
        @trace
        def solve(self, x: int) -> float:
            return float(x)

        @staticmethod
        @trace
        def check(x: int) -> bool:
            return x > 0

    assert Agent().solve(2) == 2.0
    assert Agent.check(1) is True
    first, second = proxy.events("rollout_started")
    assert (first["agent"], second["agent"]) == ("Agent.solve", "Agent.check")


async def test_tasks_run_side_by_side_in_rollouts_of_their_own(proxy: FakeProxy) -> None:
    seen: dict[int, set[str]] = {}

    @trace
    async def step(i: int) -> None:
        await asyncio.sleep(0.001 * (i % 3))
        seen[i].add(context.require().id)

    @trace(task=lambda i: str(i), reward=True)
    async def solve(i: int) -> float:
        seen[i] = {context.require().id}
        # A gather inside a rollout belongs to it as well.
        await asyncio.gather(step(i), step(i), asyncio.to_thread(lambda: seen[i].add(here())))
        return i / 10

    def here() -> str:
        return context.require().id

    await asyncio.gather(*(solve(i) for i in range(10)))
    opened = {e["task_id"]: e["rollout_id"] for e in proxy.events("rollout_started")}
    assert seen == {i: {opened[str(i)]} for i in range(10)}
    scored = {e["rollout_id"]: e["value"] for e in proxy.events("reward")}
    assert scored == {opened[str(i)]: i / 10 for i in range(10)}


# --- names of tasks --------------------------------------------------------------------------


def test_what_was_asked_is_kept_as_json_whatever_it_is(proxy: FakeProxy) -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    loop: list[Any] = []
    loop.append(loop)
    asked = {
        (1, 2): {"b", "a"},
        "nan": float("nan"),
        "deep": loop,
        "broken": Broken(),
        "surrogate": "\ud800",
        "long": "x" * 200_000,
        "wide": list(range(2_500)),
        "function": functools.partial(len, ()),
    }
    with rollout(input=asked):
        pass
    (opened,) = proxy.events("rollout_started")
    task = opened["task"]
    assert task["(1, 2)"] == ["a", "b"]
    assert task["nan"] == "nan"
    assert task["broken"].startswith("<test_")
    assert task["surrogate"] == "?"
    assert task["long"].endswith("(100000 more characters)")
    assert task["wide"][-2:] == [499, "… (2000 more)"]
    assert task["function"] == "functools.partial(<built-in function len>, ())"


def test_a_forked_child_does_not_finish_its_parents_rollout(proxy: FakeProxy) -> None:
    child = None
    try:
        with rollout():
            child = os.fork()
            if child == 0:
                reward(0.5, name="child")
                sys.exit(1)
    finally:
        if child == 0:
            os._exit(0 if tracegrad.flush(5) else 3)
    assert os.waitpid(child, 0)[1] == 0
    assert proxy.rewards() == [(0.5, "child", None)]
    assert proxy.ends() == [("completed", None)]
    assert len(proxy.events("rollout_started")) == 1


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:99999", "http://127.0.0.1:abc", "http://127.0.0.1:0", "http://[::1"),
        *(
            "http://a b:1",
            "http://h:1/?q=1",
            "http://h:1/#f",
            "http://h:1/\udcff",
            "h:1",
            "ftp://h",
        ),
    ],
)
def test_an_address_that_is_none_is_one_error(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("TRACEGRAD_URL", url)
    with pytest.raises(ValueError, match=r"^TRACEGRAD_URL: .* is not the proxy's address; give"):
        rollout().__enter__()


def test_an_address_with_a_password_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRACEGRAD_URL", "http://me:secret@127.0.0.1:4141")
    with pytest.raises(ValueError, match=r"^TRACEGRAD_URL: it is not the proxy's") as error:
        rollout().__enter__()
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("limit", ["1GB", "-1", "9" * 5_000])
def test_a_journals_limit_that_is_none_is_one_error(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setenv("TRACEGRAD_JOURNAL_BYTES", limit)
    with pytest.raises(ValueError, match=r"^TRACEGRAD_JOURNAL_BYTES: .* is no number of bytes"):
        rollout().__enter__()
