"""A weight push concerns every worker, whichever it came to, and one that starts meanwhile too."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

from support.engines.mock_engine import Answer
from support.proxy.servers import CONTROL, eventually
from support.proxy.workers import Workers, exists, two_workers
from tracegrad.proxy.engine.weight_gate import WeightUpdateGate
from tracegrad.proxy.workers.group_gate import GroupGate
from tracegrad.store import WriterLoad

Json = dict[str, Any]


@pytest.fixture
def workers(sqlite_url: str, tmp_path: Path) -> Iterator[Workers]:
    with two_workers(sqlite_url, tmp_path) as found:
        yield found


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def push(workers: Workers, what: str, **body: float | str) -> Json:
    url = f"{workers.proxy.url}/api/push/{what}"
    answer = httpx.post(url, json=body or None, headers=CONTROL, timeout=60)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def state(workers: Workers) -> Json:
    answer = httpx.get(f"{workers.proxy.url}/api/push", headers=CONTROL, timeout=60)
    found: Json = answer.json()
    return found


def stream(client: httpx.Client, rollout: str) -> str:
    body = {"messages": [{"role": "user", "content": "Tell."}], "stream": True}
    return client.post(f"/rollouts/{rollout}/v1/chat/completions", json=body).text


def test_a_push_holds_and_marks_the_calls_of_all_workers(
    workers: Workers, pool: ThreadPoolExecutor
) -> None:
    workers.engine.replies += [Answer("0123456789" * 3)] * 2
    gate = workers.engine.wait_before(3)
    streams = [
        pool.submit(stream, client, f"s{number}") for number, client in enumerate(workers.clients)
    ]
    eventually(lambda: state(workers)["in_flight"] == 2, 30)
    assert push(workers, "hold", ttl_s=300, drain_s=5) == {"in_flight": 2}
    waiting = waiting_calls(workers, pool)
    push(workers, "version", version=7)
    gate.set()
    assert [each.result(60).endswith("data: [DONE]\n\n") for each in streams] == [True, True]
    assert not any(each.done() for each in waiting)
    assert push(workers, "release") | {"in_flight": 0} == {
        "version": 7,
        "held": False,
        "in_flight": 0,
        "waiting": 0,
    }
    assert [each.result(60).status_code for each in waiting] == [200, 200]
    for number in range(2):
        [told] = workers.store.rollout_turns(f"s{number}")
        assert told.policy_versions == ((0, 12), (7, 19))
        [waited] = workers.store.rollout_turns(f"w{number}")
        assert [version for version, _ in waited.policy_versions] == [7]


def waiting_calls(workers: Workers, pool: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
    """One to each worker, over connections of their own; they wait on return."""
    body = {"messages": [{"role": "user", "content": "Wait."}]}
    url = f"{workers.proxy.url}/rollouts"
    calls = []
    for number in range(2):
        path = f"{url}/w{number}/v1/chat/completions"
        calls.append(pool.submit(httpx.post, path, json=body, timeout=60))
        eventually(lambda wanted=number + 1: state(workers)["waiting"] == wanted, 30)
    return calls


def test_a_worker_that_starts_joins_the_closed_gate(
    workers: Workers, pool: ThreadPoolExecutor
) -> None:
    engine = workers.proxy.upstream
    push(workers, "hold", ttl_s=300, drain_s=0)
    push(workers, "version", version=3)
    push(workers, "hold", ttl_s=300, drain_s=0, upstream=engine)
    push(workers, "version", version=4, upstream=engine)
    killed, kept = map(workers.pid_of, workers.clients)
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: killed not in (found := workers.pids()) and len(found) == 2, 60)
    with workers.client_elsewhere(kept, headers=CONTROL) as started:
        found = started.get("/api/push/upstreams").json()["upstreams"]
    assert found == {engine: {"version": 4, "held": True}}
    calls = waiting_calls(workers, pool)
    assert state(workers) == {"version": 3, "held": True, "in_flight": 0, "waiting": 2}
    push(workers, "release")
    assert [each.result(60).status_code for each in calls] == [200, 200]
    for number in range(2):
        [turn] = workers.store.rollout_turns(f"w{number}")
        assert [version for version, _ in turn.policy_versions] == [4]


def test_a_proxy_that_starts_held_waits_for_a_version_in_every_worker(
    sqlite_url: str, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with two_workers(sqlite_url, tmp_path, held=True) as workers:
        push(workers, "release")
        kill_one(workers)
        push(workers, "release")
        calls = waiting_calls(workers, pool)
        push(workers, "version", version=2)
        assert state(workers) == {"version": 2, "held": True, "in_flight": 0, "waiting": 2}
        push(workers, "release")
        assert [each.result(60).status_code for each in calls] == [200, 200]
        kill_one(workers)
        assert not state(workers)["held"]
        for client in workers.clients:
            workers.chat(client, [{"role": "user", "content": "Who knows that weights change?"}])
        assert [sent.get("cache_salt") for sent in workers.engine.requests[-4:]] == ["2"] * 4


def kill_one(workers: Workers) -> None:
    """And wait for the one that is started in its place."""
    killed = workers.pids()[0]
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: killed not in (found := workers.pids()) and len(found) == 2, 60)


def test_a_push_does_not_wait_for_a_worker_that_dies(
    workers: Workers, pool: ThreadPoolExecutor
) -> None:
    gate = workers.engine.wait_before(0)
    body = {"messages": [{"role": "user", "content": "Whole."}]}
    client = workers.clients[0]
    worker = workers.pid_of(client)
    call = pool.submit(client.post, "/rollouts/lost/v1/chat/completions", json=body)
    eventually(lambda: state(workers)["in_flight"] == 1, 30)
    with workers.client_elsewhere(worker, timeout=600, headers=CONTROL) as other:
        held = pool.submit(other.post, "/api/push/hold", json={"ttl_s": 900, "drain_s": 500})
        eventually(lambda: state(workers)["held"], 30)
        assert not held.done()
        os.kill(worker, signal.SIGKILL)
        assert held.result(60).json() == {"in_flight": 0}
    gate.set()
    assert isinstance(call.exception(60), httpx.TransportError)


def test_a_worker_that_hangs_is_not_waited_for_by_a_look_at_the_state(workers: Workers) -> None:
    hanging = workers.pid_of(workers.clients[0])
    os.kill(hanging, signal.SIGSTOP)
    try:
        found = workers.clients[1].get("/healthz").json()
    finally:
        os.kill(hanging, signal.SIGCONT)
    assert found["workers"] == [workers.pid_of(workers.clients[1])]
    assert exists(hanging)


class Alone:
    """A worker's gate, whose supervisor answers for nobody: all were too slow."""

    def __init__(self) -> None:
        self.sent: list[Json] = []
        self.gate = WeightUpdateGate(4)
        self.group = GroupGate(self.send, self.gate, Writer())

    def send(self, message: Json) -> None:
        self.sent.append(message)
        if "ask" in message:
            self.group.received({"answer": message["number"], "results": []})


class Writer:
    def submit(self, events: object) -> NoReturn:
        raise AssertionError

    def load(self) -> WriterLoad:
        return WriterLoad(1, 2, 3, 4)


def test_a_worker_on_a_busy_machine_speaks_at_least_for_itself() -> None:
    async def look() -> tuple[Json, Json]:
        worker = Alone()
        await worker.gate.hold(ttl_s=60, drain_s=0)
        return await worker.group.health(), dict(await worker.group.state())

    health, state = asyncio.run(look())
    assert health["workers"] == [os.getpid()]
    assert health["writer"]["bytes"] == 2
    assert state == {"version": 4, "held": True, "in_flight": 0, "waiting": 0}


def test_calls_enter_after_the_version_of_a_push_that_a_worker_meets_whole() -> None:
    async def push() -> list[int]:
        worker = Alone()
        await worker.gate.hold(ttl_s=60, drain_s=0)
        for number, (what, args) in enumerate([("set_version", {"version": 5}), ("release", {})]):
            worker.group.received({"do": what, "args": args, "number": number})
        async with worker.gate.admission(streaming=True) as call:
            return [call.version, worker.gate.version]

    assert asyncio.run(push()) == [5, 5]
