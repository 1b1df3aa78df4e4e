"""Feedback from a web page of another site: what a browser is told before and after it posts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from tracegrad.events import RolloutStarted
from tracegrad.key_derivation import CALLS, EVENTS, KeyScope, derive_key
from tracegrad.proxy import create_app
from tracegrad.proxy.config import ProxySettings
from tracegrad.store import GroupCommitWriter, Store

pytestmark = pytest.mark.databases("sqlite")

KEY = "the-admin's-own-key-of-this-test"
APP = "https://app.example"
LOCAL = "http://localhost:3000"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,idempotency-key",
}
THUMB = {"rollout_id": "mine", "thumbs": "up"}
ALLOWED = "access-control-allow-origin"


def proxy(store: Store, *origins: str, admin_key: str | None = KEY) -> TestClient:
    settings = ProxySettings(admin_key=admin_key, feedback_origins=list(origins))  # type: ignore[arg-type]
    app = create_app(settings, store=store, writer=GroupCommitWriter(store))
    return TestClient(app, base_url="http://127.0.0.1:4141")


def key_of(rollout_id: str, scope: KeyScope) -> dict[str, str]:
    return {"authorization": f"Bearer {derive_key(KEY, rollout_id, scope)}"}


def test_a_page_of_a_named_origin_posts_with_a_key_for_events(store: Store) -> None:
    store.append([RolloutStarted(rollout_id="mine")])
    client = proxy(store, APP, LOCAL)
    asked = client.options("/api/feedback", headers=PREFLIGHT | {"origin": APP})
    assert asked.status_code == 200
    assert asked.headers[ALLOWED] == APP
    assert asked.headers["access-control-allow-methods"] == "POST"
    assert "idempotency-key" in asked.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-credentials" not in asked.headers
    headers = key_of("mine", EVENTS) | {"origin": APP, "idempotency-key": "click-1"}
    answer = client.post("/api/feedback", json=THUMB, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers[ALLOWED] == APP
    assert [reward.value for reward in store.rewards("mine")] == [1.0]


def test_refusals_can_be_read_by_the_page(store: Store) -> None:
    client = proxy(store, APP)
    for headers, status in (
        ({}, 401),
        (key_of("other", EVENTS), 403),
        (key_of("mine", CALLS), 403),
    ):
        answer = client.post("/api/feedback", json=THUMB, headers=headers | {"origin": APP})
        assert answer.status_code == status
        assert answer.headers[ALLOWED] == APP
    assert store.rewards("mine") == []


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://app.example", "https://app.example:444",
     "https://app.example.evil", "null"],
)  # fmt: skip
def test_other_origins_are_told_nothing(store: Store, origin: str) -> None:
    client = proxy(store, APP)
    asked = client.options("/api/feedback", headers=PREFLIGHT | {"origin": origin})
    assert ALLOWED not in asked.headers
    headers = key_of("mine", EVENTS) | {"origin": origin}
    answer = client.post("/api/feedback", json=THUMB, headers=headers)
    assert ALLOWED not in answer.headers


@pytest.mark.parametrize("path", ["/api/events", "/v1/models", "/ui/rollouts", "/healthz"])
def test_nothing_else_is_shared(store: Store, path: str) -> None:
    client = proxy(store, APP)
    asked = client.options(path, headers=PREFLIGHT | {"origin": APP})
    assert ALLOWED not in asked.headers
    assert ALLOWED not in client.get(path, headers={"origin": APP}).headers


def test_without_the_setting_no_page_may(store: Store) -> None:
    asked = proxy(store).options("/api/feedback", headers=PREFLIGHT | {"origin": APP})
    assert ALLOWED not in asked.headers


def test_an_open_proxy_is_for_pages_of_this_machine(store: Store) -> None:
    store.append([RolloutStarted(rollout_id="mine")])
    client = proxy(store, APP, LOCAL, admin_key=None)
    local = {"origin": "http://localhost:3000"}
    assert (
        client.post("/api/feedback", json=THUMB, headers=local).headers[ALLOWED] == local["origin"]
    )
    foreign = client.post("/api/feedback", json=THUMB, headers={"origin": APP})
    assert foreign.status_code == 403
    assert "TRACEGRAD_API_KEY" in foreign.text
    assert len(store.rewards("mine")) == 1


@pytest.mark.parametrize(
    "origin",
    ["app.example", "https://app.example/", "https://app.example/path", "*", "https://*.example",
     "ftp://app.example", "https://", "null", "https://app.example:port"],
)  # fmt: skip
def test_what_is_no_origin_is_refused_with_the_form(origin: str) -> None:
    with pytest.raises(ValidationError, match="is not an origin: give scheme, host and port"):
        ProxySettings(feedback_origins=[origin])


def test_origins_are_as_browsers_write_them() -> None:
    given = ["HTTPS://App.Example", "http://127.0.0.1:3000", "http://[::1]:3000"]
    settings = ProxySettings(feedback_origins=given)
    assert settings.feedback_origins == [
        "https://app.example",
        "http://127.0.0.1:3000",
        "http://[::1]:3000",
    ]
