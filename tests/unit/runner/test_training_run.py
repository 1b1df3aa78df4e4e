"""`tracegrad.run`: groups of an agent that is a function, evaluations, and when it is enough."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import openai
import pytest

import tracegrad
from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.servers import eventually
from tracegrad.events import Outcome
from tracegrad.intake_client import IntakeView
from tracegrad.runner import quarantine_watch, training_run
from tracegrad.runner.run_record import RecordError
from tracegrad.runner.sandbox import BrokenEnvironment
from tracegrad.runner.training_run import task_id_of
from tracegrad.store import RolloutSummary

TASKS = [{"id": name, "answer": name} for name in "abc"]


def ask(rollout: tracegrad.Rollout) -> None:
    with openai.OpenAI(base_url=rollout.base_url, api_key=rollout.api_key) as client:
        messages: Any = [{"role": "user", "content": "hello"}]
        client.chat.completions.create(model="policy", messages=messages)


def stored(proxy: ProxyWithEngine, count: int) -> list[RolloutSummary]:
    def found() -> list[RolloutSummary] | None:
        rows = proxy.store.rollouts(limit=None)
        return rows if len(rows) == count and all(row.outcome for row in rows) else None

    rows: list[RolloutSummary] = eventually(found, 60)
    return rows


def test_a_function_is_run_on_each_task_and_its_number_is_the_reward(
    proxy: ProxyWithEngine,
) -> None:
    said: list[str] = []

    def solve(task: dict[str, str], rollout: tracegrad.Rollout) -> float:
        ask(rollout)
        return float(task["id"] != "b")

    report = tracegrad.run(
        solve, train=TASKS, val=TASKS, attempts=2, eval_attempts=2, said=said.append
    )
    rows = stored(proxy, 6 + 2 * 6)
    training = [row for row in rows if row.tags["split"] == "train"]
    assert Counter((row.task_id, row.reward) for row in training) == {
        ("a", 1.0): 2,
        ("b", 0.0): 2,
        ("c", 1.0): 2,
    }
    assert {row.agent for row in rows} == {"solve"}
    assert {row.held_out for row in training} == {False}
    assert {row.held_out for row in rows if row.tags["split"] == "held_out"} == {True}
    assert all(row.turns == 1 for row in rows)
    first, last = report.evaluations
    assert (first.rollouts, last.rollouts) == (6, 6)
    assert last.pass_at_1 == last.pass_at_k == pytest.approx(2 / 3)
    assert (report.groups, report.ended_by) == (3, "tasks")
    assert report.outcomes == {Outcome.COMPLETED: 6}
    assert said[-1] == "held-out: pass@1 0.667, pass@2 0.667 of 6 rollouts"


async def test_an_async_agent_runs_beside_others_and_a_reward_function_scores_it(
    proxy: ProxyWithEngine,
) -> None:
    begun = asyncio.Barrier(4)

    async def solve(task: int) -> str:
        await begun.wait()  # all of them at once, or never
        return str(task)

    async def reward(task: int, answer: str) -> float:
        return float(answer == str(task) and task != 2)

    report = await tracegrad.run_async(
        solve, train=range(4), reward=reward, task_id=str, concurrency=4
    )
    rows = stored(proxy, 4)
    assert {row.task_id: row.reward for row in rows} == {"0": 1.0, "1": 1.0, "2": 0.0, "3": 1.0}
    assert report.groups == 4


class APIConnectionError(Exception):
    """By this name clients say that their server fails."""


@pytest.mark.parametrize(
    ("error", "asks", "outcome", "reward"),
    [
        (ValueError("no tool"), True, "agent_error", 0.0),
        (ValueError("no tool"), False, "env_error", None),
        (APIConnectionError("away"), True, "infra_error", None),
        (KeyError("mine"), True, "infra_error", None),
    ],
)
def test_what_an_agent_raises_is_told_apart(
    proxy: ProxyWithEngine, error: Exception, asks: bool, outcome: str, reward: float | None
) -> None:
    def solve(task: Any, rollout: tracegrad.Rollout) -> float:
        if asks:
            ask(rollout)
        raise error

    tracegrad.run(solve, train=TASKS[:1], retries=0, infra_errors=(KeyError,))
    (row,) = stored(proxy, 1)
    assert (row.outcome, row.reward) == (outcome, reward)


def test_a_failure_of_the_serving_side_is_made_again(proxy: ProxyWithEngine) -> None:
    tries = count()

    def solve(task: Any, rollout: tracegrad.Rollout) -> float:
        ask(rollout)
        if next(tries) == 0:
            raise ConnectionResetError("the engine restarts")
        return 1.0

    report = tracegrad.run(solve, train=TASKS[:1])
    assert (report.replaced, report.groups) == (1, 1)
    assert Counter(str(row.outcome) for row in stored(proxy, 2)) == {
        "completed": 1,
        "infra_error": 1,
    }


def test_what_the_agent_says_itself_stands(proxy: ProxyWithEngine) -> None:
    def solve(task: Any, rollout: tracegrad.Rollout) -> str:
        tracegrad.reward(0.25)
        rollout.finish("budget")
        return "answer"

    report = tracegrad.run(solve, train=TASKS[:1])
    (row,) = stored(proxy, 1)
    assert (row.outcome, row.reward) == ("budget", 0.25)
    assert report.outcomes == {Outcome.BUDGET: 1}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A trainer as far as a driver sees one: the version that it serves."""
    serves = 0

    def serve(version: int) -> None:
        nonlocal serves
        serves = version

    monkeypatch.setattr(training_run, "read_intake", lambda: IntakeView(True, 2, serves))
    monkeypatch.setattr(training_run, "_LOOK_S", 0.05)
    return serve


def test_it_ends_when_the_trainer_has_made_its_steps(
    proxy: ProxyWithEngine, versions: Callable[[int], None]
) -> None:
    """Also where there is no end of tasks; each is asked as often as the trainer's groups want."""
    served = count()

    def solve(task: Any) -> float:
        versions(next(served) // 8)
        return 1.0

    endless = ({"id": str(n % 5)} for n in count())
    report = tracegrad.run(solve, train=endless, steps=3, concurrency=4, said=lambda _: None)
    assert report.ended_by == "steps"
    assert report.groups >= 8, "two attempts a group, eight a version, four under way"
    assert report.training[0].version == 0
    assert report.picture is not None
    assert report.picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("settings", "ended_by", "evaluations"),
    [({"stop_at": 0.9}, "stop_at", 3), ({"patience": 2}, "patience", 4)],
)
def test_it_ends_when_held_out_tasks_say_so(
    proxy: ProxyWithEngine,
    versions: Callable[[int], None],
    settings: dict[str, Any],
    ended_by: str,
    evaluations: int,
) -> None:
    """A version for each evaluation; of the second on, held-out tasks succeed, or never."""
    version = 0

    def solve(task: dict[str, str]) -> float:
        time.sleep(0.01)
        return float(ended_by == "stop_at" and version > 0)

    def said(line: str) -> None:
        nonlocal version
        if line.startswith("held-out"):
            version += 1
            versions(version)

    endless = ({"id": str(n)} for n in count())
    report = tracegrad.run(
        solve, train=endless, val=TASKS, eval_every=1, said=said, concurrency=4, **settings
    )
    assert report.ended_by == ended_by
    # The last one is of what was served when the training had ended.
    assert [one.version for one in report.evaluations] == [*range(evaluations)]


def test_held_out_tasks_that_succeed_at_once_need_no_training(
    proxy: ProxyWithEngine, versions: Callable[[int], None]
) -> None:
    report = tracegrad.run(
        lambda task: 1.0, train=TASKS, val=TASKS, eval_every=1, stop_at=0.9, said=lambda _: None
    )
    assert (report.ended_by, report.outcomes) == ("stop_at", {})
    assert [one.version for one in report.evaluations] == [0]


def test_evaluations_without_a_reward_end_nothing_and_are_said(
    proxy: ProxyWithEngine, versions: Callable[[int], None]
) -> None:
    said: list[str] = []

    def solve(task: dict[str, str]) -> float:
        if task["id"] in "abc":
            raise LookupError("no such tool")
        versions(1 + int(task["id"]) // 8)
        return 1.0

    endless = ({"id": str(n)} for n in count())
    tracegrad.run(
        solve, train=endless, val=TASKS, eval_every=1, stop_at=0.9, steps=3, retries=0,
        concurrency=4, said=said.append,
    )  # fmt: skip
    assert said.count("held-out: no attempt has a reward") >= 2
    (failure,) = [line for line in said if "no such tool" in line]
    assert failure.startswith("env_error at ")
    assert failure.endswith(": LookupError: no such tool (before any LLM call)")
    assert "training rollouts" in said[-2]


def test_what_has_no_reward_is_said_beside_pass_at_1(proxy: ProxyWithEngine) -> None:
    said: list[str] = []

    def solve(task: dict[str, str]) -> float:
        if task["id"] == "b":
            raise LookupError("no such tool")
        return 1.0

    report = tracegrad.run(solve, val=TASKS, eval_attempts=2, retries=0, said=said.append)
    assert [(one.rollouts, one.asked) for one in report.evaluations] == [(4, 6)] * 2
    assert said[-1] == "held-out: pass@1 1.000, pass@2 1.000 of 4 rollouts; 2 more have no reward"


async def until_ended(folder: Path, attempts: int) -> None:
    """In the record: an attempt whose agent has ended may not have, yet."""
    while (folder / "record.jsonl").read_text().count('"ended"') < attempts:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_an_interrupted_run_says_how_to_go_on_and_keeps_what_it_has_seen(
    proxy: ProxyWithEngine, versions: Callable[[int], None], tmp_path: Path
) -> None:
    """Its evaluations, and the rewards of each version for the curve."""
    said: list[str] = []
    waits = asyncio.Event()

    async def slow(task: dict[str, str]) -> float:
        versions(1)
        if task["id"] == "c":
            waits.set()
            await asyncio.Event().wait()
        return 0.0

    async def fast(task: dict[str, str]) -> float:
        return 1.0

    options: dict[str, Any] = {"train": TASKS, "val": [{"id": "v"}], "concurrency": 1}
    folder = tmp_path / "run"
    running = asyncio.create_task(
        tracegrad.run_async(slow, folder=folder, said=said.append, **options)
    )
    await waits.wait()
    await until_ended(folder, 4)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert said[-1] == f"interrupted; go on with resume={str(folder)!r}"
    versions(2)
    report = await tracegrad.run_async(
        fast, name="slow", resume=folder, said=said.append, **options
    )
    assert [(one.version, one.pass_at_1) for one in report.evaluations] == [(0, 0.0), (2, 1.0)]
    *before, last = report.training
    assert (last.version, last.reward, last.rollouts) == (2, 1.0, 2)
    assert {point.reward for point in before} == {0.0}
    assert sum(point.rollouts for point in before) == 4


async def test_a_run_goes_on_where_it_was(proxy: ProxyWithEngine, tmp_path: Path) -> None:
    folder, done, waits = tmp_path / "run", list[str](), asyncio.Event()

    async def solve(task: dict[str, str]) -> float:
        done.append(task["id"])
        if done.count("c") == 1:
            waits.set()
            await asyncio.Event().wait()
        return 1.0

    options: dict[str, Any] = {"train": TASKS, "concurrency": 1}
    running = asyncio.create_task(tracegrad.run_async(solve, folder=folder, **options))
    await waits.wait()
    await until_ended(folder, 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert done == ["a", "b", "c"]
    report = await tracegrad.run_async(solve, resume=folder, **options)
    assert done == ["a", "b", "c", "c"]
    assert report.groups == 3
    with pytest.raises(RecordError, match="attempts was 1 and is 2 now"):
        await tracegrad.run_async(solve, attempts=2, resume=folder, **options)


async def test_what_breaks_meanwhile_is_left_out_also_where_tasks_have_no_end(
    proxy: ProxyWithEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where nothing else is left, the run ends."""
    monkeypatch.setattr(quarantine_watch, "LOOK_S", 0.1)
    monkeypatch.setattr(training_run, "_MOST_LEFT_OUT", 100)
    is_left_out, said, broken = asyncio.Event(), list[str](), list[str]()

    def hear(line: str) -> None:
        said.append(line)
        if line.startswith("left out: task broken is quarantined (rule:fails): "):
            is_left_out.set()

    async def solve(task: dict[str, str], rollout: tracegrad.Rollout) -> float:
        if task["id"] == "broken":
            broken.append(task["id"])
            raise BrokenEnvironment("its database is gone")
        await asyncio.to_thread(ask, rollout)
        if len(broken) > 9:
            await is_left_out.wait()
        return 1.0

    good = [task for _ in range(14) for task in ({"id": "broken"}, {"id": "good"})]
    report = await tracegrad.run_async(
        solve, train=chain(good, repeat({"id": "broken"})), concurrency=1, retries=0, said=hear
    )
    assert report.outcomes[Outcome.COMPLETED] == 14
    assert 8 <= len(broken) < 13
    assert (report.ended_by, [*report.left_out]) == ("tasks", ["broken"])
    assert "its database is gone" in report.left_out["broken"]
    again = await tracegrad.run_async(
        solve, train=[{"id": "broken"}, {"id": "good"}], said=said.append
    )
    assert again.outcomes == {Outcome.COMPLETED: 1}
    assert [*again.left_out] == ["broken"]


def test_a_function_that_hangs_keeps_no_other_from_its_turn(proxy: ProxyWithEngine) -> None:
    """Of each group the first hangs, and is cut; nobody can end its thread."""
    hang, seen = threading.Event(), set[str]()

    def solve(task: dict[str, str]) -> float:
        if task["id"] not in seen:
            seen.add(task["id"])
            hang.wait(60)
        return 1.0

    try:
        report = tracegrad.run(
            solve, train=TASKS, over_sample=1, concurrency=2, said=lambda _: None
        )
    finally:
        hang.set()
    assert report.outcomes == {Outcome.COMPLETED: 3, Outcome.ABORTED: 3}
    assert report.cut == 3


def test_what_would_end_the_process_ends_an_attempt(proxy: ProxyWithEngine) -> None:
    def solve(task: dict[str, str], rollout: tracegrad.Rollout) -> float:
        ask(rollout)
        raise SystemExit(3)

    report = tracegrad.run(solve, train=TASKS[:1], said=lambda _: None)
    assert report.outcomes == {Outcome.AGENT_ERROR: 1}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attempts": 0}, "attempts: 0 is not 1 or more"),
        ({"train": iter([1]), "epochs": 2}, "epochs: train is an iterator"),
        ({"stop_at": 0.5}, "stop_at: needs held-out tasks"),
        ({"stop_at": 0.5, "val": TASKS}, "stop_at: needs evaluations meanwhile; give eval_every="),
        ({"attempts": "8"}, "attempts: '8' is not 1 or more"),
        ({"retries": -1}, "retries: -1 is not 0 or more"),
        ({"timeout_s": 0}, "timeout_s: 0 is not more than 0"),
        ({"train": "tasks.jsonl"}, "train: 'tasks.jsonl' is no list of tasks"),
        ({"val": 5}, "val: 5 is no list of tasks"),
        ({"val": iter(TASKS)}, "val: an iterator goes by once"),
        ({"val": [*TASKS, {"id": "b"}]}, "val: two tasks have the id 'b'"),
        ({"folder": "a", "resume": "b"}, "folder: resume names it"),
        ({"train": [object()]}, "has no task_id or id"),
    ],
)
def test_wrong_arguments_are_named(
    proxy: ProxyWithEngine, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        tracegrad.run(lambda task: 1.0, **settings)


def test_what_is_no_agent_is_said() -> None:
    with pytest.raises(ValueError, match=r"agent: 1\.0 is no function") as raised:
        tracegrad.run(1.0, train=TASKS)  # type: ignore[arg-type]
    assert raised.value.__context__ is None


def test_tasks_have_ids() -> None:
    class Task:
        task_id = "t"

    assert task_id_of(Task()) == "t"
    assert task_id_of({"id": 7}) == "7"
    assert task_id_of("text") == task_id_of("text") != task_id_of("other")


async def test_in_a_running_loop_it_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match="run_async"):
        tracegrad.run(lambda task: 1.0)
