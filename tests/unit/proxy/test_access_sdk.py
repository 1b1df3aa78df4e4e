"""The SDK with an admin key: every rollout gets a key of its own as it opens."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from test_access_guard import ADMIN, a_proxy
from test_access_keys import Cupboard

import tracegrad
from support.proxy_rig import serving
from tracegrad import client, rollout, telemetry, trace
from tracegrad.client import NoKey, Outbox, Refused, Unreachable

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
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client, "_outboxes", {})
    monkeypatch.setattr(telemetry, "_private", {})


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


def test_facts_and_spans_are_sent_with_the_key(proxy: str, seen: Seen) -> None:
    with rollout() as r:
        r.reward(1)
    assert tracegrad.flush(5)
    assert seen.keys("/v1/traces") == {f"Bearer {ADMIN}"}
    assert seen.keys("/api/events") == {f"Bearer {ADMIN}"}
    assert seen.keys(f"/api/rollouts/{r.id}/keys") == {f"Bearer {ADMIN}"}


def test_without_the_variable_nothing_is_asked(
    proxy: str, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRACEGRAD_API_KEY")
    box = Outbox(proxy)
    assert box.mint("r1") is None
    assert seen.requests == []


def test_an_open_proxy_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(a_proxy(None, Cupboard())) as url:
        monkeypatch.setenv("TRACEGRAD_URL", url)
        monkeypatch.setenv("TRACEGRAD_API_KEY", ADMIN)
        with rollout() as r:
            assert r.api_key == f"tg-{r.id}"


def test_a_wrong_key_is_one_clear_error(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEGRAD_API_KEY", "a-wrong-admin-key")
    with pytest.raises(NoKey) as caught, rollout():
        pass
    assert str(caught.value) == (
        f"the tracegrad proxy at {proxy} makes no key for the rollout (it answers 401:"
        " set TRACEGRAD_API_KEY to the admin key that it was started with)"
    )


def test_a_rollouts_key_opens_no_rollouts(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with rollout() as r:
        monkeypatch.setenv("TRACEGRAD_API_KEY", r.api_key)
        with pytest.raises(NoKey, match="the key of one rollout"), rollout():
            pass


def test_no_proxy_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEGRAD_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TRACEGRAD_API_KEY", ADMIN)
    with pytest.raises(NoKey, match=r"refused: start it with `tracegrad proxy`"), rollout():
        pass


def test_another_server_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()

    @app.post("/api/rollouts/{rollout_id}/keys")
    async def odd(rollout_id: str) -> list[int]:
        return [7]

    monkeypatch.setenv("TRACEGRAD_API_KEY", ADMIN)
    for server, words in ((app, "TypeError"), (FastAPI(), "it answers 404: TRACEGRAD_URL leads")):
        with serving(server) as url:
            monkeypatch.setenv("TRACEGRAD_URL", url)
            with pytest.raises(NoKey, match=words), rollout():
                pass


@pytest.mark.parametrize("key", ["two words", "line\nend", "schlüssel"])
def test_a_key_that_cannot_be_sent_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    monkeypatch.setenv("TRACEGRAD_API_KEY", key)
    with pytest.raises(ValueError, match="TRACEGRAD_API_KEY") as caught, rollout():
        pass
    assert key not in str(caught.value)


def test_facts_wait_for_the_right_key(
    proxy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRACEGRAD_API_KEY", "a-wrong-admin-key")
    box = Outbox(proxy)
    with caplog.at_level(logging.WARNING), pytest.raises(Unreachable):
        box.post("/api/events", b"[1, 2]", "application/json")
    assert "it answers 401: set TRACEGRAD_API_KEY" in caplog.text
    assert "a-wrong-admin-key" not in caplog.text
    monkeypatch.setenv("TRACEGRAD_API_KEY", ADMIN)
    box.post("/api/events", b"[1, 2]", "application/json")


def test_what_a_key_may_not_do_is_not_tried_again(proxy: str) -> None:
    with rollout() as r, pytest.MonkeyPatch.context() as env:
        env.setenv("TRACEGRAD_API_KEY", r.api_key)
        with pytest.raises(Refused, match="403"):
            Outbox(proxy).post("/api/push/hold", json.dumps({}).encode(), "application/json")
