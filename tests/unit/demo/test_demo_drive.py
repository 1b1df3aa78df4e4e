"""The driver against a real HTTP server that plays the model by a fixed rule."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shop import agent, chart, drive, rollouts, tasks
from tracegrad import Rollout, flush


class Shop:
    """Answers chat completions: looks a stock up rightly, a price in the catalogue."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.rollouts: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.failures = 0  # how many calls fail before one succeeds
        self.hold = asyncio.Event()
        self.hold.set()
        self.open = 0
        self.most_open = 0

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.rollouts.append(request.headers.get("x-tracegrad-rollout", ""))
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        await self.hold.wait()
        await asyncio.sleep(0.002)
        self.open -= 1
        if self.failures:
            self.failures -= 1
            return JSONResponse({"error": {"message": "engine is gone"}}, 500)
        return JSONResponse(completion(reply(body["messages"])))

    async def take_events(self, request: Request) -> Response:
        self.events += (await request.json())["events"]
        return JSONResponse({"accepted": 1})

    async def take_traces(self, request: Request) -> Response:
        return Response(b"", media_type="application/x-protobuf")

    def given(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]


def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": messages[-1]["content"]}
    question = messages[0]["content"]
    item = next(item for item in tasks.ITEMS if f" {item}" in question)
    city = next(city for city in tasks.CITIES if city in question)
    stock = question.startswith(("How many", "Count"))
    arguments = json.dumps({"item": item, "city": city})
    function = {"name": "stock" if stock else "list_price", "arguments": arguments}
    call = {"id": "call-1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def completion(message: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    head = {"id": "c", "object": "chat.completion", "created": 0, "model": "policy"}
    return {**head, "choices": [choice]}


@pytest.fixture
async def shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Shop]:
    shop = Shop()
    routes = [
        Route("/v1/chat/completions", shop.complete, methods=["POST"]),
        Route("/api/events", shop.take_events, methods=["POST"]),
        Route("/v1/traces", shop.take_traces, methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACEGRAD_URL", f"http://127.0.0.1:{port}")
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
    monkeypatch.setattr(agent, "client", client)
    yield shop
    shop.hold.set()
    await asyncio.to_thread(flush)
    await client.close()
    server.should_exit = True
    await serving


async def test_an_evaluation_counts_right_answers_and_records_them(shop: Shop) -> None:
    exam = tasks.exam("validation", 30)
    seen: list[int] = []
    score = await drive.evaluate(
        exam, 0.0, "validation", concurrency=5, tags={"phase": "before"},
        progress=lambda score: seen.append(score.rollouts),
    )  # fmt: skip
    await asyncio.to_thread(flush)

    assert score == drive.Score(10, 30)
    assert score.rate == pytest.approx(1 / 3)
    assert 0.08 < score.error < 0.09
    assert seen == list(range(1, 31))
    assert shop.most_open == 5
    assert {request["temperature"] for request in shop.requests} == {0.0}
    opened = {event["rollout_id"]: event for event in shop.given("rollout_started")}
    assert set(opened) == set(shop.rollouts)
    assert {event["task_id"] for event in opened.values()} == {task.task_id for task in exam}
    tags = {"split": "validation", "phase": "before"}
    assert all(event["tags"] == tags for event in opened.values())
    rewards = {event["rollout_id"]: event["value"] for event in shop.given("reward")}
    assert rewards == {
        rollout_id: float(event["task_id"].startswith("stock"))
        for rollout_id, event in opened.items()
    }
    assert {event["outcome"] for event in shop.given("rollout_finished")} == {"completed"}


async def test_an_evaluation_refuses_tasks_of_another_split(shop: Shop) -> None:
    with pytest.raises(ValueError, match="is not of the split 'held_out'"):
        await drive.evaluate(tasks.exam("validation", 3), 0.0, "held_out")


async def test_training_runs_whole_groups_and_waits_for_permission(shop: Shop) -> None:
    permits = 0

    async def permit() -> None:
        nonlocal permits
        permits += 1

    source = islice(tasks.train_tasks(), 6)
    groups = [g async for g in drive.train(source, samples=4, concurrency=8, permit=permit)]
    await asyncio.to_thread(flush)

    expected = list(islice(tasks.train_tasks(), 6))
    assert sorted(g.task.task_id for g in groups) == sorted(t.task_id for t in expected)
    assert all(g.successes == (float(g.task.kind == "stock"),) * 4 for g in groups)
    assert shop.most_open == 8
    assert permits == 6 + 2  # each of two workers asks once more, then finds no task
    sizes = Counter(event["task_id"] for event in shop.given("rollout_started"))
    assert sizes == {task.task_id: 4 for task in expected}
    assert len(shop.given("reward")) == 24


async def test_shuffled_rewards_are_the_same_numbers_given_to_others(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = random.Random(1)
    monkeypatch.setattr(tasks.Task, "reward", lambda task, answer: truth.choice([0.0, 1.0]))
    given: dict[str, list[float]] = {}

    def record(self: Rollout, value: float) -> None:
        given.setdefault(self.task_id or "", []).append(value)

    monkeypatch.setattr(Rollout, "reward", record)
    source = islice(tasks.train_tasks(), 6)
    groups = [g async for g in drive.train(source, samples=8, shuffle_rewards=0)]

    assert all(sorted(given[g.task.task_id]) == sorted(g.successes) for g in groups)
    assert any(given[g.task.task_id] != list(g.successes) for g in groups)


async def test_a_failing_engine_is_not_the_agents_fault(shop: Shop) -> None:
    shop.failures = 1
    score = await drive.evaluate(tasks.exam("held_out", 1), 1.0, "held_out")
    await asyncio.to_thread(flush)
    assert score == drive.Score(1, 1)
    outcomes = [event["outcome"] for event in shop.given("rollout_finished")]
    assert outcomes == ["infra_error", "completed"]
    assert len(shop.given("reward")) == 1


async def test_an_engine_that_stays_away_stops_everything_with_its_own_error(shop: Shop) -> None:
    shop.failures = 10_000
    with pytest.raises(openai.InternalServerError, match="engine is gone"):
        async for _ in drive.train(tasks.train_tasks(), samples=2, concurrency=4):
            pass
    await no_other_task_runs()


async def test_training_stops_when_its_iterator_is_closed(shop: Shop) -> None:
    groups = drive.train(tasks.train_tasks(), samples=2, concurrency=4)
    assert isinstance(groups, AsyncIterator)
    async for _ in groups:
        shop.hold.clear()
        break
    await groups.aclose()  # type: ignore[attr-defined]
    shop.hold.set()
    await no_other_task_runs()


async def no_other_task_runs() -> None:
    await asyncio.sleep(0.05)
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    files = {getattr(coroutine, "cr_code").co_filename for coroutine in coroutines}  # noqa: B009
    assert __file__ in files
    assert rollouts.__file__ not in files


async def test_an_agent_that_never_answers_has_used_up_its_budget(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "MAX_TURNS", 1)
    score = await drive.evaluate(tasks.exam("held_out", 1), 1.0, "held_out")
    await asyncio.to_thread(flush)
    assert score == drive.Score(0, 1)
    assert [event["outcome"] for event in shop.given("rollout_finished")] == ["budget"]


@pytest.fixture
def exams() -> tuple[chart.Exam, chart.Exam]:
    before = chart.Exam(0, drive.Score(4, 200), drive.Score(70, 200))
    return before, chart.Exam(3, drive.Score(198, 200), drive.Score(186, 200))


def test_the_chart_is_a_picture(tmp_path: Path, exams: tuple[chart.Exam, chart.Exam]) -> None:
    rewards = [(version, float(k < 3 + version)) for version in (2, 0, 1) for k in range(8)]
    scores = chart.scores_by_version(rewards)
    assert {version: score.rate for version, score in scores.items()} == {
        0: 0.375, 1: 0.5, 2: 0.625,
    }  # fmt: skip
    path = chart.draw(tmp_path / "new" / "curve.png", rewards, *exams, title="learning")
    assert path.read_bytes().startswith(b"\x89PNG")
