"""The SDK with an admin key: every rollout has a key of its own, and nobody is asked for it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

import tracegrad
from support.proxy.guarded_app import ADMIN, a_proxy
from support.proxy.key_store import Cupboard
from support.proxy.servers import serving
from tracegrad import exporter, rollout, telemetry, trace
from tracegrad.exporter import EventExporter
from tracegrad.key_derivation import derive_key, verify_derived_key
from tracegrad.transport import ProxyRefused, ProxyUnreachable, Transport

ASK = {"model": "m", "messages": [{"role": "user", "content": "?"}]}


class Seen:
    """What the guarded application was asked, and with which key."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None]] = []

    def keys(self, path: str) -> set[str | None]:
        return {key for asked, key in self.requests if asked == path}


@pytest.fixture
def seen() -> Seen:
    return Seen()


def watched(app: FastAPI, seen: Seen) -> Any:
    async def watch(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            key = Request(scope).headers.get("authorization")
            seen.requests.append((scope["path"], key))
        await app(scope, receive, send)

    return watch


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    exporters: dict[str, EventExporter] = {}
    monkeypatch.setattr(exporter, "_exporters", exporters)
    monkeypatch.setenv("TRACEGRAD_JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setattr(telemetry, "_private", {})
    yield
    for each in exporters.values():
        each.shutdown()


@pytest.fixture
def proxy(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """TRACEGRAD_URL and TRACEGRAD_API_KEY lead to it."""
    with serving(watched(a_proxy(ADMIN, Cupboard()), seen)) as url:
        monkeypatch.setenv("TRACEGRAD_URL", url)
        monkeypatch.setenv("TRACEGRAD_API_KEY", ADMIN)
        yield url
        tracegrad.flush(5)


def test_a_rollouts_key_opens_its_rollout_and_no_other(proxy: str) -> None:
    with rollout() as one, rollout() as other:
        assert one.api_key.startswith(f"tg-{one.id}.")
        assert ADMIN not in one.api_key
        headers = {"authorization": f"Bearer {one.api_key}", "x-tracegrad-rollout": one.id}
        mine = httpx.post(f"{one.base_url}/chat/completions", json=ASK, headers=headers)
        theirs = httpx.post(f"{other.base_url}/chat/completions", json=ASK, headers=headers)
    assert (mine.status_code, mine.json()["rollout"]) == (200, one.id)
    assert theirs.status_code == 403


def test_an_agent_inside_a_rollout_needs_no_key_of_its_own(proxy: str) -> None:
    @trace
    def solve() -> httpx.Response:
        headers = {"authorization": "Bearer not-needed"}
        return httpx.post(f"{proxy}/v1/chat/completions", json=ASK, headers=headers)

    answer = solve()
    assert answer.status_code == 200
    assert answer.json()["bound"] is True
    outside = httpx.post(f"{proxy}/v1/chat/completions", json=ASK)
    assert outside.status_code == 401


def test_events_and_spans_are_sent_with_the_key(proxy: str, seen: Seen) -> None:
    with rollout() as r:
        r.reward(1)
    assert tracegrad.flush(60)
    assert seen.keys("/v1/traces") == {f"Bearer {ADMIN}"}
    assert seen.keys("/api/events") == {f"Bearer {ADMIN}"}
    assert {path for path, _ in seen.requests} == {"/v1/traces", "/api/events"}


def test_without_the_variable_a_key_only_names_its_rollout(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRACEGRAD_API_KEY")
    with rollout() as r:
        assert r.api_key == f"tg-{r.id}"


def test_an_open_proxy_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(a_proxy(None, Cupboard())) as url:
        monkeypatch.setenv("TRACEGRAD_URL", url)
        monkeypatch.setenv("TRACEGRAD_API_KEY", ADMIN)
        with rollout() as r:
            headers = {"authorization": f"Bearer {r.api_key}"}
            answer = httpx.post(f"{url}/v1/chat/completions", json=ASK, headers=headers)
        assert (answer.status_code, answer.json()["rollout"]) == (200, r.id)
        assert tracegrad.flush(60)


def test_a_key_is_there_at_once_and_opens_the_proxy_when_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent runs, and its key works, although nobody could be asked for either."""
    monkeypatch.setenv("TRACEGRAD_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TRACEGRAD_API_KEY", ADMIN)
    with rollout() as r:
        key = r.api_key
    with serving(a_proxy(ADMIN, Cupboard())) as url:
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=ASK, headers=headers)
    assert (answer.status_code, answer.json()["rollout"]) == (200, r.id)


def test_a_derived_key_is_its_rollouts_and_the_admin_keys() -> None:
    key = derive_key(ADMIN, "r.1")
    assert verify_derived_key(key, ADMIN) == ("r.1", "calls")
    assert verify_derived_key(derive_key(ADMIN, "r.1", "events"), ADMIN) == ("r.1", "events")
    assert verify_derived_key(key, "another-admin-key") is None
    assert verify_derived_key(key.replace("r.1", "r.2"), ADMIN) is None
    assert verify_derived_key(key[:-1], ADMIN) is None
    assert verify_derived_key("tg-r.1", ADMIN) is None
    assert len({derive_key(ADMIN, f"r.{i}") for i in range(100)}) == 100


@pytest.mark.parametrize("used_before", [True, False])
def test_a_revoked_rollouts_derived_key_opens_nothing(proxy: str, used_before: bool) -> None:
    key = derive_key(ADMIN, "r1")
    own, admin = ({"authorization": f"Bearer {each}"} for each in (key, ADMIN))
    if used_before:
        assert httpx.post(f"{proxy}/v1/chat/completions", json=ASK, headers=own).status_code == 200
    assert httpx.delete(f"{proxy}/api/rollouts/r1/keys", headers=admin).status_code == 204
    for _ in range(2):
        answer = httpx.post(f"{proxy}/v1/chat/completions", json=ASK, headers=own)
        assert answer.status_code == 401


def test_a_wrong_key_is_one_clear_warning_and_the_agent_runs(
    proxy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRACEGRAD_API_KEY", "a-wrong-admin-key")
    with rollout() as r:
        r.reward(1)
    assert not tracegrad.flush(0.3)
    assert (
        f"cannot reach the tracegrad proxy at {proxy} (it answers 401: set TRACEGRAD_API_KEY to"
        " the admin key that it was started with): events wait until it answers"
    ) in caplog.text
    monkeypatch.setenv("TRACEGRAD_API_KEY", ADMIN)
    assert tracegrad.flush(60)


def test_a_rollouts_key_opens_no_rollouts_and_its_agent_runs(
    proxy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with rollout() as r:
        monkeypatch.setenv("TRACEGRAD_API_KEY", r.api_key)

        @trace
        def agent() -> httpx.Response:
            headers = {"authorization": f"Bearer {r.api_key}"}
            return httpx.post(f"{proxy}/v1/chat/completions", json=ASK, headers=headers)

    answer = agent()
    assert (answer.status_code, answer.json()["rollout"]) == (200, r.id)


@pytest.mark.parametrize("key", ["two words", "line\nend", "schlüssel"])
def test_a_key_that_cannot_be_sent_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    monkeypatch.setenv("TRACEGRAD_API_KEY", key)
    with pytest.raises(ValueError, match="TRACEGRAD_API_KEY") as caught, rollout():
        pass
    assert key not in str(caught.value)


def test_events_wait_for_the_right_key(
    proxy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRACEGRAD_API_KEY", "a-wrong-admin-key")
    box = Transport(proxy)
    with caplog.at_level(logging.WARNING), pytest.raises(ProxyUnreachable):
        box.post("/api/events", b"[1, 2]", "application/json")
    assert "it answers 401: set TRACEGRAD_API_KEY" in caplog.text
    assert "a-wrong-admin-key" not in caplog.text
    monkeypatch.setenv("TRACEGRAD_API_KEY", ADMIN)
    box.post("/api/events", b"[1, 2]", "application/json")


def test_what_a_key_may_not_do_is_not_tried_again(proxy: str) -> None:
    with rollout() as r, pytest.MonkeyPatch.context() as env:
        env.setenv("TRACEGRAD_API_KEY", r.api_key)
        with pytest.raises(ProxyRefused, match="403"):
            Transport(proxy).post("/api/push/hold", json.dumps({}).encode(), "application/json")
