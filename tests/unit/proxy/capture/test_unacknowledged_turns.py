"""A client that got a 503 has no turn that is trained, whatever the store does later."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from support.engines.mock_engine import MODEL
from support.proxy.proxy_with_engine import ServeProxy
from support.proxy.servers import eventually
from tracegrad.events import Turn
from tracegrad.store import GroupCommitWriter, Ledger, Store

Turns = Callable[..., list[Turn]]

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
PATH = "/rollouts/r1/v1/chat/completions"
# What a busy machine commits within, and no longer than tests may wait.
PATIENCE_S = 1.5


@pytest.fixture
def writer(store: Store) -> Iterator[GroupCommitWriter]:  # type: ignore[override]
    with GroupCommitWriter(store, max_submissions=4) as writer:
        yield writer


@pytest.fixture
def http(serve_proxy: ServeProxy) -> Iterator[httpx.Client]:
    """A proxy that waits for the store for as long as a test can."""
    with serve_proxy(patience_s=PATIENCE_S) as client:
        yield client


@contextmanager
def locked(store: Store) -> Iterator[None]:
    """By another process, as it seems: readers read, nobody writes."""
    other = sqlite3.connect(store.database.describe(), isolation_level=None)
    try:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")
    finally:
        other.close()


def call(http: httpx.Client, **more: Any) -> httpx.Response:
    return http.post(PATH, json=ASK, **more)


def test_what_was_refused_is_kept_and_not_trained(
    http: httpx.Client, store: Store, turns: Turns
) -> None:
    with locked(store):
        # The first is being written when it is given up; the others wait behind it.
        with httpx.Client(base_url=http.base_url, timeout=30) as other:
            answers: list[httpx.Response] = []
            callers = [
                threading.Thread(target=lambda: answers.append(call(other))) for _ in range(3)
            ]
            [caller.start() for caller in callers]
            [caller.join() for caller in callers]
        for answer in answers:
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert f"has not answered for {PATIENCE_S} s" in answer.json()["error"]["message"]
    again = call(http, headers={"x-stainless-retry-count": "1"})
    assert again.status_code == 200
    kept = eventually(turns)
    trainable = [turn for turn in kept if turn.untrainable is None]
    assert len(trainable) == 1, "the retried call, once"
    assert {turn.untrainable for turn in kept} <= {None, "unacknowledged"}
    assert http.get("/healthz").json()["writer"]["unacknowledged"] == len(kept) - 1


def test_the_trainer_sees_why(http: httpx.Client, store: Store, turns: Turns) -> None:
    with locked(store):
        assert call(http).status_code == 503
    eventually(turns)
    events = [
        {"type": "reward", "rollout_id": "r1", "value": 1.0},
        {"type": "rollout_finished", "rollout_id": "r1"},
    ]
    http.post("/api/events", json={"events": events}).raise_for_status()
    [group] = Ledger(store).lease(groups=1, group_size=1, owner="t", ttl_s=60)
    assert [turn.untrainable for turn in group.rollouts[0].turns] == ["unacknowledged"]


def test_a_client_that_tries_again_by_itself_is_recorded_once(
    http: httpx.Client, store: Store, turns: Turns
) -> None:
    base = f"{http.base_url}/rollouts/r1/v1"
    held = locked(store)
    held.__enter__()
    said: list[int] = []

    def free_after_the_first_refusal(answer: httpx.Response) -> None:
        said.append(answer.status_code)
        if len(said) == 1:
            held.__exit__(None, None, None)

    watched = httpx.Client(event_hooks={"response": [free_after_the_first_refusal]})
    with openai.OpenAI(base_url=base, api_key="x", max_retries=2, http_client=watched) as client:
        client.chat.completions.create(**ASK)  # type: ignore[call-overload]
    assert said == [503, 200]
    reasons = [turn.untrainable for turn in turns()]
    assert sorted(map(str, reasons)) == ["None", "unacknowledged"]


def test_a_stream_gets_an_error_and_is_not_trained(
    http: httpx.Client, store: Store, turns: Turns
) -> None:
    with locked(store):
        answer = http.post(PATH, json={**ASK, "stream": True})
        assert "the store cannot be written" in answer.text
        assert "[DONE]" not in answer.text
    [turn] = eventually(turns)
    assert turn.untrainable == "unacknowledged"


def test_events_that_were_refused_are_sent_again(http: httpx.Client, store: Store) -> None:
    reward = {"type": "reward", "rollout_id": "r1", "reward_id": "w", "value": 1.0}
    with locked(store):
        answer = http.post("/api/events", json={"events": [reward]})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    for _ in range(2):
        eventually(lambda: http.post("/api/events", json={"events": [reward]}).is_success)
    assert [each.value for each in store.rewards("r1")] == [1.0]


def test_a_full_queue_is_a_503_at_once(
    serve_proxy: ServeProxy, store: Store, writer: GroupCommitWriter, turns: Turns
) -> None:
    """With all the patience that there is by default."""
    with serve_proxy() as http:
        waiting = [threading.Thread(target=call, args=(http,)) for _ in range(4)]
        with locked(store):
            [each.start() for each in waiting]
            eventually(lambda: writer.load().submissions == 4)
            answer = call(http)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "4 submissions of 0 MiB wait" in answer.json()["error"]["message"]
            assert http.get("/healthz").json()["writer"]["refused"] == 1
        [each.join() for each in waiting]
    assert [turn.untrainable for turn in turns()] == [None] * 4
