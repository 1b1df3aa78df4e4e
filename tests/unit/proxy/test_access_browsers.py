"""A proxy that asks for no key does not serve the pages of a browser on its machine."""

from __future__ import annotations

import httpx
import pytest

from support.mock_engine import MODEL, MockEngine
from support.proxy_rig import HeldWriter, serving
from tracegrad.proxy import create_app
from tracegrad.proxy.browsers import check_local
from tracegrad.proxy.errors import ApiError
from tracegrad.settings import ProxySettings
from tracegrad.store import Store

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
HERE = [
    "127.0.0.1:4141",
    "localhost",
    "localhost:4141",
    "agent.localhost:80",
    "[::1]:4141",
    "192.168.1.7:4141",
    "proxy",
    "proxy:4141",
    "host.docker.internal:4141",
    "LOCALHOST",
    "laptop.local.",
    "",
]
ELSEWHERE = ["evil.example:4141", "127.0.0.1.evil.example", "localhost.evil.example", "a.b", "[:"]


@pytest.mark.parametrize("host", HERE)
def test_names_of_this_machine_are_served(host: str) -> None:
    check_local([(b"host", host.encode())])


@pytest.mark.parametrize("host", ELSEWHERE)
def test_a_name_that_somebody_may_own_is_refused(host: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_local([(b"accept", b"*/*"), (b"host", host.encode())])
    assert caught.value.status == 403
    assert "TRACEGRAD_API_KEY" in caught.value.message


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "https://127.0.0.1", "vscode-file://vscode-app", "tauri://localhost"],
)
def test_pages_of_this_machine_and_applications_are_served(origin: str) -> None:
    check_local([(b"host", b"localhost"), (b"origin", origin.encode())])


@pytest.mark.parametrize("origin", ["https://evil.example", "http://a.b:4141", "null", ""])
def test_a_page_from_elsewhere_is_refused(origin: str) -> None:
    with pytest.raises(ApiError, match="page from elsewhere"):
        check_local([(b"host", b"localhost"), (b"origin", origin.encode())])


def test_nothing_of_a_refused_call_reaches_the_engine_or_the_store(
    http: httpx.Client, engine: MockEngine, store: Store
) -> None:
    for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
        answer = http.post("/v1/chat/completions", json=ASK, headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "not_from_here"
    assert engine.requests == []
    assert store.rollouts() == []
    assert http.get("/healthz", headers={"host": "evil.example"}).status_code == 200


def test_whoever_has_the_key_may_come_by_any_name(
    engine_url: str, store: Store, writer: HeldWriter
) -> None:
    key = "the-admin's-own-key"
    settings = ProxySettings(upstream=engine_url, admin_key=key)  # type: ignore[arg-type]
    with serving(create_app(settings, store=store, writer=writer)) as url:
        headers = {"host": "proxy.example", "authorization": f"Bearer {key}"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=ASK, headers=headers, timeout=20)
    assert answer.status_code == 200
