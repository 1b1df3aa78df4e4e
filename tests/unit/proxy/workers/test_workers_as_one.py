"""Several workers behave as one proxy: what one did, the other knows at its next request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from support.engines.mock_engine import MODEL, Answer, render
from support.proxy.otlp_json import chat, send, span
from support.proxy.workers import ADMIN_KEY, Workers, two_workers
from support.store.intake_requests import intake_request
from tracegrad.events import Outcome, Turn
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.workers.worker import worker_settings
from tracegrad.store.ledger.intake import Intake


@pytest.fixture
def workers(url: str, tmp_path: Path) -> Iterator[Workers]:
    with two_workers(url, tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """For tests with rollouts of their own, which change nothing for others."""
    folder = tmp_path_factory.mktemp("workers")
    with two_workers(f"sqlite:///{folder}/store.db", folder) as found:
        yield found


def conversation(workers: Workers, rollout: str | None, turns: int, name: str) -> None:
    """Each turn goes to the other worker than the one before."""
    messages = []
    for number in range(turns):
        messages.append({"role": "user", "content": f"{name} {number}"})
        workers.engine.replies.append(Answer(f"answer {number} of {name}"))
        before = render(messages)
        workers.chat(workers.clients[number % 2], messages, rollout)
        asked = workers.engine.requests[-1]
        if number:
            given = asked["kv_transfer_params"]["prompt_token_ids"]
            assert given == before, "the engine was given the conversation's own tokens"


def assert_one_line(turns: list[Turn], count: int) -> None:
    assert len(turns) == count
    for earlier, later in pairwise(turns):
        assert (later.parent_id, later.fork_reason) == (earlier.turn_id, None)
        tokens = [*earlier.prompt_token_ids, *earlier.completion_token_ids]
        assert later.prompt_token_ids.tolist()[: len(tokens)] == tokens


def test_a_conversation_goes_on_in_another_worker_token_for_token(workers: Workers) -> None:
    conversation(workers, "named", 6, "question")
    assert_one_line(workers.store.rollout_turns("named"), 6)
    conversation(workers, None, 4, "a question without a name")
    [untitled] = {row.rollout_id for row in workers.store.rollouts(limit=None)} - {"named"}
    assert_one_line(workers.store.rollout_turns(untitled), 4)


def test_a_call_that_runs_in_one_worker_is_counted_by_the_other(lasting: Workers) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "slowly"}]}
    gate, asked = lasting.engine.wait_before(0), len(lasting.engine.requests)

    def call() -> None:
        lasting.clients[0].post("/rollouts/running/v1/chat/completions", json=body)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        while len(lasting.engine.requests) == asked:
            thread.join(0.005)
        question = {"events": [], "calls_of": ["running", "none"]}
        answer = lasting.clients[1].post("/api/events", json=question).json()
    finally:
        gate.set()
        thread.join()
        lasting.engine._gates.clear()
    assert [each["calls"] for each in answer["calls"]] == [1, 0]


def test_places_are_given_once_whichever_worker_is_asked(workers: Workers) -> None:
    """By drivers at once, and over both databases."""
    Intake(workers.store).request(intake_request(in_flight=12))
    found: list[str] = []

    def drive(client: httpx.Client) -> None:
        for _ in range(5):
            answer = client.post("/api/intake", json={"rollouts": 2})
            assert answer.status_code in (201, 202)
            found.extend(answer.json()["rollout_ids"])

    threads = [threading.Thread(target=drive, args=(client,)) for client in workers.clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(set(found)) == 12


def test_a_retry_that_meets_another_worker_gets_the_recorded_answer(lasting: Workers) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "once"}]}
    path = "/rollouts/retried/v1/chat/completions"
    lasting.engine.replies += [Answer("the only one"), Answer("another")]
    asked = len(lasting.engine.requests)
    first = lasting.clients[0].post(path, json=body).json()
    again = {"x-stainless-retry-count": "1"}
    second = lasting.clients[1].post(path, json=body, headers=again).json()
    lasting.engine.replies.clear()
    said = [answer["choices"][0]["message"]["content"] for answer in (first, second)]
    assert said == ["the only one", "the only one"]
    assert len(lasting.engine.requests) == asked + 1
    assert len(lasting.store.rollout_turns("retried")) == 1


def test_a_trace_is_known_to_every_worker(lasting: Workers) -> None:
    trace = {"traceparent": f"00-{'7' * 32}-{'8' * 16}-01"}
    hello = [{"role": "user", "content": "hello"}]
    lasting.chat(lasting.clients[0], [*hello], "traced", trace)
    lasting.chat(lasting.clients[1], [{"role": "user", "content": "bye"}], None, trace)
    assert len(lasting.store.rollout_turns("traced")) == 2


def test_the_spans_of_a_call_and_of_its_trace_may_come_to_any_worker(lasting: Workers) -> None:
    first, second = lasting.clients
    answer = lasting.chat(first, [{"role": "user", "content": "spans"}])
    before = {row.rollout_id for row in lasting.store.rollouts(limit=None)}
    reported = {"gen_ai.response.id": answer["id"], "session.id": "s1"}
    send(second, span(2, "chat", chat(1, **reported), parent=1))
    send(first, span(1, "agent", {"gen_ai.operation.name": "invoke_agent"}))
    rows = {row.rollout_id: row for row in lasting.store.rollouts(limit=None)}
    assert set(rows) == before, "the span told of a call that is a turn already"
    [mine] = [row for row in rows.values() if row.tags]
    assert mine.tags == {"session.id": "s1"}
    assert (mine.turns, mine.outcome) == (1, Outcome.COMPLETED)


def test_previous_responses_are_found_by_every_worker(lasting: Workers) -> None:
    first, second = lasting.clients
    one = first.post("/rollouts/stored/v1/responses", json={"model": "m", "input": "one"}).json()
    body = {"model": "m", "input": "two", "previous_response_id": one["id"]}
    assert second.post("/rollouts/stored/v1/responses", json=body).status_code == 200
    assert_one_line(lasting.store.rollout_turns("stored"), 2)


def test_connections_are_shared_out_evenly(lasting: Workers) -> None:
    mine, _ = (lasting.pid_of(client) for client in lasting.clients)
    with connected(lasting, 8) as others:
        served = [lasting.pid_of(client) for client in others]
    # One that has just left may be counted yet.
    assert 3 <= served.count(mine) <= 5, served


@contextmanager
def connected(workers: Workers, count: int) -> Iterator[list[httpx.Client]]:
    """As many more clients, each with a connection of its own."""
    with ExitStack() as stack:
        opened = [httpx.Client(base_url=workers.proxy.url, timeout=20) for _ in range(count)]
        for client in opened:
            stack.enter_context(client).get("/healthz")
        yield opened


def test_a_revoked_key_opens_nothing_in_any_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEGRAD_API_KEY", ADMIN_KEY)
    with two_workers(f"sqlite:///{tmp_path}/store.db", tmp_path) as workers:
        first, second = workers.clients
        key = first.post("/api/rollouts/agent/keys").json()["key"]
        with_key = {"authorization": f"Bearer {key}"}
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        for client in (first, second):  # both remember it now
            answer = client.post("/v1/chat/completions", json=body, headers=with_key)
            assert answer.status_code == 200
        assert first.delete("/api/rollouts/agent/keys").status_code == 204
        for client in (second, first):
            answer = client.post("/v1/chat/completions", json=body, headers=with_key)
            assert answer.status_code == 401


def test_a_worker_has_its_part_of_the_limits() -> None:
    limits = {"max_connections": 10, "max_waiting": 7, "max_bodies_mib": 100, "cache_mib": 64}
    settings = ProxySettings(workers=3, **limits)
    mine = worker_settings(settings)
    parts = {"max_connections": 4, "max_waiting": 3, "max_bodies_mib": 34, "cache_mib": 64}
    assert {name: getattr(mine, name) for name in limits} == parts
    assert worker_settings(ProxySettings(workers=2, max_waiting=0)).max_waiting == 0


def test_connections_beyond_the_limit_of_all_get_a_503(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    # The workers' two clients are connected too, and one that has just left may be counted yet.
    with two_workers(url, tmp_path, max_connections=8) as workers, connected(workers, 4) as clients:
        assert [client.get("/docs").status_code for client in clients] == [200] * 4
        with connected(workers, 4) as more:
            served = {client.get("/docs").status_code for client in [*clients, *more]}
    assert 503 in served
