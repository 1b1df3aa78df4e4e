"""`GET /metrics`: what calls of every kind add to it, and who may read it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from support.engines.byte_tokenizer import save_byte_tokenizer
from support.engines.mock_engine import MODEL, Answer
from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from support.proxy.raw_http import hang_up
from support.proxy.servers import CONTROL, eventually
from support.proxy.workers import ADMIN, Workers, two_workers
from tracegrad.events import Json
from tracegrad.proxy.metrics.names import PREFIX

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/rollouts/r1/v1/chat/completions"
KEY = "a-key-of-the-scrapers"


def scrape(client: httpx.Client, **more: Any) -> dict[tuple[str, ...], float]:
    """Name and labels' values -> value."""
    answer = client.get("/metrics", **more)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name.removeprefix(PREFIX), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def grown(client: httpx.Client, before: dict[tuple[str, ...], float]) -> dict[str, float]:
    """Counters and histograms' counts that are not what they were, as `name value ...`."""
    after = scrape(client)
    return {
        " ".join(key): value - before[key]
        for key, value in after.items()
        if value != before[key] and key[0].endswith(("_total", "_count"))
    }


def test_a_call_that_streams(rig: ProxyWithEngine) -> None:
    before = scrape(rig.http)
    rig.http.post(CHAT, json={"messages": HELLO, "stream": True}).raise_for_status()
    [turn] = rig.turns()
    stages = ("proxy", "gate", "queue", "prefill", "decode", "commit")
    assert grown(rig.http, before) == {
        "calls_total chat 2xx": 1,
        "call_seconds_count": 1,
        "time_to_first_token_seconds_count": 1,
        **{f"stage_seconds_count {stage}": 1 for stage in stages},
        "prompt_tokens_total tokenized": len(turn.prompt_token_ids),
        "sampled_tokens_total": len(turn.completion_token_ids),
        "turns_committed_total": 1,
    }


def test_a_whole_answer_has_no_first_token(rig: ProxyWithEngine) -> None:
    before = scrape(rig.http)
    rig.http.post(
        "/v1/messages", json={"model": MODEL, "messages": HELLO, "max_tokens": 9}
    ).raise_for_status()
    found = grown(rig.http, before)
    assert found["calls_total messages 2xx"] == 1
    assert found["stage_seconds_count inference"] == 1
    assert "time_to_first_token_seconds_count" not in found


def test_what_goes_wrong_is_counted_by_what_it_was(rig: ProxyWithEngine) -> None:
    before = scrape(rig.http)
    assert rig.http.post(CHAT, json={"messages": "none"}).status_code == 400
    rig.engine.failure = (500, {"error": {"message": "oh"}}, {})
    assert rig.http.post(CHAT, json={"messages": HELLO}).status_code == 500
    rig.engine.failure = None
    rig.engine.replies.append(Answer("a story that has no end"))
    rig.engine.error_at = 2
    rig.http.post(CHAT, json={"messages": HELLO, "stream": True})
    rig.engine.error_at = None
    found = grown(rig.http, before)
    assert found["calls_total chat 4xx"] == 1
    assert found["calls_total chat 5xx"] == 1
    assert found["calls_total chat broken"] == 1
    assert found["turns_untrainable_total aborted"] == 1


def test_a_client_that_left_and_a_store_that_is_away(rig: ProxyWithEngine) -> None:
    before = scrape(rig.http)
    hold = rig.engine.wait_before(0)
    hang_up(f"{rig.url}{CHAT}", {"messages": HELLO}, once=lambda: rig.engine.requests)
    eventually(lambda: grown(rig.http, before).get("calls_total chat aborted") == 1)
    hold.set()
    rig.writer.broken = True
    assert rig.http.post(CHAT, json={"messages": HELLO}).status_code == 503
    found = grown(rig.http, before)
    assert found["calls_total chat 5xx"] == 1
    assert found["turns_lost_total store_unavailable"] == 1
    assert found["turns_committed_total"] == 1, "the one that was aborted"
    assert scrape(rig.http)["calls_in_flight",] == 0


def test_gauges_say_how_it_stands(rig: ProxyWithEngine) -> None:
    rig.http.post("/api/push/hold", json={}, headers=CONTROL).raise_for_status()
    rig.http.post("/api/push/version", json={"version": 4}, headers=CONTROL).raise_for_status()
    found = scrape(rig.http)
    assert found["gate_held",] == 1
    assert found["gate_held_seconds_total",] == 0, "it has not ended"
    assert found["policy_version",] == 4
    assert found["upstream_up", rig.engine_url] == 1
    rig.http.post("/api/push/release", json={}, headers=CONTROL).raise_for_status()
    found = scrape(rig.http)
    assert found["gate_held",] == 0
    assert found["gate_held_seconds_total",] > 0
    assert found["body_bytes",] == 0
    assert found["body_limit_bytes",] > 0


def test_a_continued_conversation_reuses_tokens_and_a_changed_one_forks(
    serve_proxy: ServeProxy, rig: ProxyWithEngine, tmp_path: Path
) -> None:
    with serve_proxy(tokenizer=save_byte_tokenizer(tmp_path)) as http:
        rig.engine.replies += [Answer("one"), Answer("two"), Answer("three")]
        http.post(CHAT, json={"messages": HELLO}).raise_for_status()
        [first] = rig.turns()
        before = scrape(http)
        said = [*HELLO, {"role": "assistant", "content": "one"}]
        more: list[Json] = [*said, {"role": "user", "content": "and then?"}]
        http.post(CHAT, json={"messages": more}).raise_for_status()
        second = rig.turns()[1]
        recorded = len(first.prompt_token_ids) + len(first.completion_token_ids)
        found = grown(http, before)
        assert second.parent_id == first.turn_id
        assert found["prompt_tokens_total reused"] == recorded
        assert found["prompt_tokens_total tokenized"] == len(second.prompt_token_ids) - recorded
        more[0] = {"role": "user", "content": "Goodbye"}
        before = scrape(http)
        http.post(CHAT, json={"messages": more}).raise_for_status()
        assert grown(http, before)[f"forks_total {rig.turns()[2].fork_reason}"] == 1


def test_who_may_read_it(serve_proxy: ServeProxy) -> None:
    admin = "an-admin-key-of-tests"
    with serve_proxy(admin_key=admin, metrics_key=KEY) as http:
        assert http.get("/metrics").status_code == 401
        made = http.post("/api/rollouts/r1/keys", headers={"x-api-key": admin}).json()["key"]
        assert http.get("/metrics", headers={"x-api-key": made}).status_code == 403
        for key in (admin, KEY):
            scrape(http, headers={"authorization": f"Bearer {key}"})
        for path in ("/v1/models", "/api/push", "/openapi.json"):
            assert http.get(path, headers={"x-api-key": KEY}).status_code == 401
    with serve_proxy() as http:
        scrape(http)
        agents = {"authorization": "Bearer tg-r1"}
        assert http.get("/metrics", headers=agents).status_code == 403
        elsewhere = {"origin": "https://example.com"}
        assert http.get("/metrics", headers=elsewhere).status_code == 403


def test_any_worker_tells_of_all_and_none_goes_backwards(sqlite_url: str, tmp_path: Path) -> None:
    with two_workers(sqlite_url, tmp_path) as workers:
        for number, client in enumerate(workers.clients):
            workers.chat(client, list(HELLO), f"r{number}")
        for client in workers.clients:
            # The worker that answers counts it behind its answer.
            eventually(lambda one=client: scrape(one)["calls_total", "chat", "2xx"] == 2, 30)
        killed = workers.pid_of(workers.clients[1])
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: _both_serve(workers, killed), 60)
        with httpx.Client(base_url=workers.proxy.url, headers=ADMIN, timeout=60) as client:
            found = scrape(client)
            assert found["calls_total", "chat", "2xx"] == 2
            assert found["calls_in_flight",] == 0
            workers.chat(client, list(HELLO), "r3")
            eventually(lambda: scrape(workers.clients[0])["calls_total", "chat", "2xx"] == 3, 30)


def _both_serve(workers: Workers, killed: int) -> bool:
    try:
        pids = workers.pids()
    except httpx.TransportError:
        return False
    return killed not in pids and len(pids) == 2
