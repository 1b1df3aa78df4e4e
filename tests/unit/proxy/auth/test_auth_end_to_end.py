"""Keys, attribution and redaction on the whole way through the proxy."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from support.engines.mock_engine import MODEL, Answer, MockEngine
from support.proxy.proxy_with_engine import ServeProxy
from support.proxy.raw_http import bounded, connect
from support.proxy.servers import HeldWriter, eventually
from tracegrad.events import Turn
from tracegrad.proxy import create_app
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.http.limits import ConnectionLimits
from tracegrad.store import Store

Turns = Callable[..., list[Turn]]

ADMIN = "the-admin's-own-key"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def closed(serve_proxy: ServeProxy) -> Iterator[httpx.Client]:
    """A client with the admin key of a proxy that has one."""
    with serve_proxy(admin_key=ADMIN, as_admin=True) as client:
        yield client


def key_for(closed: httpx.Client, rollout_id: str, *scopes: str) -> str:
    wanted = {"json": {"scopes": scopes}} if scopes else {}
    answer = closed.post(f"/api/rollouts/{rollout_id}/keys", **wanted)  # type: ignore[arg-type]
    assert answer.status_code == 201
    key: str = answer.json()["key"]
    return key


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_rollouts_key_makes_turns_of_its_rollout(
    closed: httpx.Client, engine: MockEngine, turns: Turns
) -> None:
    key = key_for(closed, "r1")
    client = openai.OpenAI(base_url=f"{closed.base_url}/v1", api_key=key, max_retries=0)
    for stream in (False, True):
        answer: Any = client.chat.completions.create(**ASK, stream=stream)  # type: ignore[call-overload]
        if stream:
            list(answer)
    assert len(turns("r1")) == 2
    assert [headers.get("authorization") for headers in engine.headers] == [None, None]


@pytest.mark.parametrize(
    ("path", "name", "word"),
    [
        ("/v1/chat/completions", "type", "authentication_error"),
        ("/v1/responses", "type", "authentication_error"),
        ("/rollouts/r1/v1/messages", "type", "authentication_error"),
        ("/v1beta/models/m:generateContent", "status", "UNAUTHENTICATED"),
        ("/v1/nothing", "type", "authentication_error"),
        ("/docs", "type", "authentication_error"),
    ],
)
def test_a_stranger_gets_an_error_of_the_dialect(
    closed: httpx.Client, engine: MockEngine, path: str, name: str, word: str
) -> None:
    for key in ("none", f"tg-r1.{'s' * 43}"):
        answer = closed.post(path, json=ASK, headers=bearer(key))
        assert answer.status_code == 401
        reported = answer.json()
        assert reported["error"][name] == word
        assert (reported.get("type") == "error") is path.endswith("/messages")
        assert "TRACEGRAD_API_KEY" in reported["error"]["message"]
    assert engine.requests == []


def test_the_same_order_in_every_dialect(
    closed: httpx.Client, engine: MockEngine, turns: Turns
) -> None:
    bodies = {
        "/v1/chat/completions": ASK,
        "/v1/completions": {"model": MODEL, "prompt": "Hello"},
        "/v1/responses": {"model": MODEL, "input": "Hello"},
        "/v1/messages": {**ASK, "max_tokens": 9},
        "/v1beta/models/m:generateContent": {"contents": [{"parts": [{"text": "Hello"}]}]},
    }
    for number, (path, body) in enumerate(bodies.items()):
        names = {"x-tracegrad-rollout": f"header{number}", "baggage": "tracegrad.rollout=bag"}
        closed.post(f"/rollouts/path{number}{path}", json=body, headers=names).raise_for_status()
        closed.post(path, json=body, headers=names).raise_for_status()
        key = key_for(closed, f"key{number}")
        named = {"x-api-key": key, "authorization": "", "baggage": "tracegrad.rollout=bag"}
        closed.post(path, json=body, headers=named).raise_for_status()
        closed.post(
            path, json=body, headers={"baggage": f"tracegrad.rollout=bag{number}"}
        ).raise_for_status()
        for name in ("path", "header", "key", "bag"):
            assert len(turns(f"{name}{number}")) == 1, (path, name)


def test_a_known_trace_names_its_rollout(http: httpx.Client, turns: Turns) -> None:
    http.post(
        "/rollouts/r1/v1/chat/completions", json=ASK, headers={"traceparent": PARENT}
    ).raise_for_status()
    other = {**ASK, "messages": [{"role": "user", "content": "Something else"}]}
    http.post("/v1/chat/completions", json=other, headers={"traceparent": PARENT})
    http.post("/v1/chat/completions", json=other)
    assert len(turns("r1")) == 2


def test_a_key_for_events_posts_to_its_own_rollout(closed: httpx.Client, store: Store) -> None:
    key = bearer(key_for(closed, "mine", "events"))
    mine = {"type": "reward", "rollout_id": "mine", "value": 1.0}
    closed.post("/api/events", json={"events": [mine]}, headers=key).raise_for_status()
    theirs = {**mine, "rollout_id": "theirs"}
    answer = closed.post("/api/events", json={"events": [mine, theirs]}, headers=key)
    assert answer.status_code == 403
    assert "rollout theirs" in answer.json()["error"]["message"]
    assert [reward.value for reward in store.rewards("mine")] == [1.0]
    assert store.rewards("theirs") == []


def spans(rollout_id: str | None) -> bytes:
    export = ExportTraceServiceRequest()
    span = export.resource_spans.add().scope_spans.add().spans.add()
    span.trace_id, span.span_id, span.name = bytes.fromhex(TRACE), b"12345678", "tool"
    if rollout_id is not None:
        attribute = span.attributes.add()
        attribute.key, attribute.value.string_value = "tracegrad.rollout", rollout_id
    raw: bytes = export.SerializeToString()
    return raw


def test_a_rollouts_spans_are_its_own(closed: httpx.Client, store: Store) -> None:
    key = bearer(key_for(closed, "mine")) | {"content-type": "application/x-protobuf"}
    # A trace that is another rollout's does not take them there.
    closed.post(
        "/rollouts/theirs/v1/chat/completions", json=ASK, headers={"traceparent": PARENT}
    ).raise_for_status()
    closed.post("/v1/traces", content=spans(None), headers=key).raise_for_status()
    assert closed.post("/v1/traces", content=spans("theirs"), headers=key).status_code == 403
    assert [span.name for span in store.spans("mine")] == ["tool"]
    assert store.spans("theirs") == []


def test_a_rollouts_key_reads_no_other_rollouts_answers(
    closed: httpx.Client, engine: MockEngine
) -> None:
    body = {"model": MODEL, "input": "a secret of theirs"}
    theirs = closed.post("/rollouts/theirs/v1/responses", json=body).json()["id"]
    asked = len(engine.requests)
    again = {"model": MODEL, "input": "and?", "previous_response_id": theirs}
    answer = closed.post("/v1/responses", json=again, headers=bearer(key_for(closed, "mine")))
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["code"] == "previous_response_not_found"
    assert len(engine.requests) == asked
    assert closed.post("/rollouts/theirs/v1/responses", json=again).status_code == 200


def test_a_key_outlives_the_proxy_and_is_nowhere_in_the_store(
    serve_proxy: ServeProxy, tmp_path: Path
) -> None:
    with serve_proxy(admin_key=ADMIN, as_admin=True) as admin:
        key = key_for(admin, "r1")
        admin.post("/v1/chat/completions", json=ASK, headers=bearer(key)).raise_for_status()
    with serve_proxy(admin_key=ADMIN, as_admin=True) as admin:
        assert admin.get("/v1/models", headers=bearer(key)).status_code == 200
        admin.delete("/api/rollouts/r1/keys").raise_for_status()
        assert admin.get("/v1/models", headers=bearer(key)).status_code == 401
    kept = b"".join(path.read_bytes() for path in tmp_path.glob("store.db*"))
    assert key.rpartition(".")[2].encode() not in kept
    assert hashlib.sha256(key.encode()).hexdigest().encode() not in kept, "bytes, not text"


def test_a_body_of_any_kind_has_its_limit(serve_proxy: ServeProxy) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * (1 << 16)

    with serve_proxy(max_body_mib=1) as http:
        for path in ("/v1/chat/completions", "/v1/messages", "/api/events", "/v1/traces"):
            kind = "application/x-protobuf" if path == "/v1/traces" else "application/json"
            for content in (b" " * ((1 << 20) + 1), endless()):
                answer = http.post(path, content=content, headers={"content-type": kind})
                assert answer.status_code == 413, path
                assert "larger than 1 MiB" in answer.json()["error"]["message"]


def test_a_stream_that_nobody_reads_is_an_aborted_turn(
    engine_url: str, engine: MockEngine, store: Store, writer: HeldWriter, turns: Turns
) -> None:
    engine.replies.append(Answer("x" * 20_000))
    engine.wait_before(4000)  # the engine is not done: more than that the client does not take
    app = create_app(ProxySettings(upstream=engine_url), store=store, writer=writer)
    body = json.dumps({**ASK, "stream": True})
    head = (
        "POST /rollouts/r1/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with (
        bounded(app, ConnectionLimits(send_idle_s=0.3), send_buffer=8192) as url,
        connect(url, receive_buffer=4096) as client,
    ):
        client.sendall((head + body).encode())
        [turn] = eventually(turns)
    assert turn.untrainable == "aborted"
    assert 0 < len(turn.completion_token_ids) < 20_000
    eventually(lambda: engine.aborted == 1)


HOOKS = """
def clean(record):
    if "fail" in repr(record):
        raise ValueError(repr(record))
    return eval(repr(record).replace("geheim", "***"))
"""


@pytest.fixture
def redacting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve_proxy: ServeProxy
) -> Iterator[httpx.Client]:
    (tmp_path / "walk_hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    with serve_proxy(redact=["walk_hooks:clean"]) as client:
        yield client


def said(text: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]}


def test_the_model_and_the_client_see_what_the_store_does_not(
    redacting: httpx.Client, engine: MockEngine, turns: Turns
) -> None:
    engine.replies.append(Answer("it is geheim"))
    answer = redacting.post("/rollouts/r1/v1/chat/completions", json=said("geheim?"))
    assert answer.json()["choices"][0]["message"]["content"] == "it is geheim"
    assert engine.requests[0]["messages"][0]["content"] == "geheim?"
    [turn] = turns("r1")
    assert turn.request is not None
    assert turn.response is not None
    assert turn.request["messages"][0]["content"] == "***?"
    assert turn.response["choices"][0]["message"]["content"] == "it is ***"
    assert turn.completion_token_ids.tolist() == Answer("it is geheim").token_ids
    assert turn.untrainable is None


def test_a_second_turn_continues_the_first_as_it_was(
    redacting: httpx.Client, engine: MockEngine, turns: Turns
) -> None:
    engine.replies += [Answer("it is geheim"), Answer("yes")]
    redacting.post("/rollouts/r1/v1/chat/completions", json=said("geheim?")).raise_for_status()
    body = said("geheim?")
    body["messages"] += [
        {"role": "assistant", "content": "it is geheim"},
        {"role": "user", "content": "is it?"},
    ]
    redacting.post("/rollouts/r1/v1/chat/completions", json=body).raise_for_status()
    first, second = turns("r1")
    assert second.parent_id == first.turn_id


def test_where_a_hook_fails_the_turn_is_kept_without_its_texts(
    redacting: httpx.Client, turns: Turns, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "tracegrad.proxy"):
        redacting.post("/rollouts/r1/v1/chat/completions", json=said("fail")).raise_for_status()
    [turn] = turns("r1")
    assert (turn.request, turn.response) == (None, None)
    assert len(turn.completion_token_ids) > 0
    assert "redact: walk_hooks:clean failed (ValueError at " in caplog.text
    assert "Hello" not in caplog.text


def test_events_are_redacted_too(redacting: httpx.Client, store: Store) -> None:
    events = [
        {"type": "rollout_started", "rollout_id": "r1", "task": "geheim", "tags": {"a": "geheim"}},
        {
            "type": "span",
            "rollout_id": "r1",
            "trace_id": TRACE,
            "span_id": "1" * 16,
            "name": "geheim",
            "start_ns": 0,
            "end_ns": 1,
            "attributes": {"a": "geheim"},
        },
        {
            "type": "rollout_finished",
            "rollout_id": "r1",
            "outcome": "agent_error",
            "error": "geheim",
        },
    ]
    redacting.post("/api/events", json={"events": events}).raise_for_status()
    [span] = store.spans("r1")
    assert (span.name, span.attributes) == ("***", {"a": "***"})
    assert "geheim" not in repr(store.rollout("r1"))
    assert "***" in repr(store.rollout("r1"))
