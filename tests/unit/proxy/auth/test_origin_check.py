"""A proxy that asks for no key does not serve the pages of a browser on its machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from support.engines.mock_engine import MODEL
from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from support.proxy.raw_http import Reader, bounded, connect
from support.proxy.servers import HeldWriter, serving
from tracegrad.proxy import create_app
from tracegrad.proxy.auth.origin_check import OriginCheck
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.http.errors import ApiError
from tracegrad.proxy.http.limits import ConnectionLimits
from tracegrad.store import Store

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
NAMED = ["laptop.local", "host.docker.internal", "192.168.1.7", "fd00::7", "proxy"]
HERE = [
    "127.0.0.1:4141",
    "127.9.9.9",
    "localhost",
    "localhost:4141",
    "agent.localhost:80",
    "[::1]:4141",
    "[::ffff:127.0.0.1]:4141",
    "LOCALHOST",
    "",
]
ALLOWED = [
    "192.168.1.7:4141",
    "proxy:4141",
    "host.docker.internal:4141",
    "Laptop.Local.",
    "[fd00::7]",
]
ELSEWHERE = [
    *ALLOWED,
    "evil.example:4141",
    "evil.local",
    "evil",
    "0.0.0.0:4141",
    "203.0.113.7",
    "[2001:db8::1]",
    "[::ffff:203.0.113.7]",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "a.b",
    "[:",
    "localhost@evil.example",
    "localhost/evil",
    ":4141",
]


def check(
    *headers: tuple[str, str], method: str = "POST", allowed: list[str] | None = None
) -> None:
    given = [(name.encode(), value.encode()) for name, value in headers]
    OriginCheck(allowed or []).check(method, given)


@pytest.mark.parametrize("host", HERE)
def test_names_of_this_machine_are_served(host: str) -> None:
    check(("host", host))


@pytest.mark.parametrize("host", ALLOWED)
def test_names_in_the_settings_are_served(host: str) -> None:
    named = ProxySettings(allowed_hosts=[*NAMED, "Other.Example."]).allowed_hosts
    check(("host", host), ("origin", f"http://{host}"), allowed=named)


@pytest.mark.parametrize("host", ELSEWHERE)
def test_a_name_that_is_not_this_machines_is_refused(host: str) -> None:
    with pytest.raises(ApiError) as caught:
        check(("accept", "*/*"), ("host", host))
    assert caught.value.status == 403
    assert "TRACEGRAD_API_KEY" in caught.value.message
    assert "allowed_hosts" in caught.value.message


def test_of_two_host_fields_none_may_be_elsewhere() -> None:
    with pytest.raises(ApiError):
        check(("host", "localhost"), ("host", "evil.example"))


@pytest.mark.parametrize("wrong", ["http://a", "a:80", "a/b", "a b", "", "*.local", "-"])
def test_an_allowed_host_is_a_name(wrong: str) -> None:
    with pytest.raises(ValueError, match="allowed_hosts"):
        ProxySettings(allowed_hosts=[wrong])


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "https://127.0.0.1",
        "http://[::1]:3000",
        "vscode-file://vscode-app",
        "tauri://localhost",
    ],
)
def test_pages_of_this_machine_and_applications_are_served(origin: str) -> None:
    # As browsers and Electron send it along.
    check(("host", "localhost"), ("origin", origin), ("sec-fetch-site", "cross-site"))


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://a.b:4141",
        "http://203.0.113.7",
        "http://192.168.1.7:4141",
        "http://laptop.local",
        "HTTP://evil.example",
        "ws://evil.example",
        "wss://203.0.113.7",
        "blob:http://evil.example",
        "http://localhost@evil.example",
        "http://",
        "null",
        "",
    ],
)
def test_a_page_from_elsewhere_is_refused(origin: str) -> None:
    with pytest.raises(ApiError, match="page from elsewhere"):
        check(("host", "localhost"), ("origin", origin))


LINK = (("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document"))


@pytest.mark.parametrize("site", ["cross-site", "same-site", "something-new"])
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("GET", ()),  # an image, a script
        ("GET", (("sec-fetch-mode", "no-cors"), ("sec-fetch-dest", "image"))),
        ("GET", (("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "iframe"))),
        ("POST", LINK),  # a form
    ],
)
def test_what_another_site_sends_is_refused(
    site: str, method: str, more: tuple[tuple[str, str], ...]
) -> None:
    with pytest.raises(ApiError, match="Sec-Fetch-Site"):
        check(("host", "localhost"), ("sec-fetch-site", site), *more, method=method)


@pytest.mark.parametrize(
    ("site", "more"), [("cross-site", LINK), ("none", ()), ("same-origin", ())]
)
def test_a_link_that_somebody_follows_is_served(
    site: str, more: tuple[tuple[str, str], ...]
) -> None:
    check(("host", "localhost"), ("sec-fetch-site", site), *more, method="GET")


FOREIGN = [
    {"host": "evil.local"},
    {"origin": "http://203.0.113.7"},
    {"sec-fetch-site": "cross-site"},
]


def test_nothing_of_a_refused_call_reaches_the_engine_or_the_store(rig: ProxyWithEngine) -> None:
    for headers in FOREIGN:
        for path in ("/v1/chat/completions", "/api/events", "/v1/traces", "/api/push/hold"):
            answer = rig.http.post(path, json=ASK, headers=headers)
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "not_from_here"
    assert rig.engine.requests == []
    assert rig.store.rollouts() == []
    assert rig.http.get("/healthz", headers={"host": "evil.example"}).status_code == 200


@pytest.mark.parametrize("server", [bounded, serving])
def test_a_websocket_of_a_page_is_refused(
    engine_url: str,
    store: Store,
    writer: HeldWriter,
    server: Callable[..., AbstractContextManager[str]],
) -> None:
    """The proxy's own server takes it for an ordinary request; another hands it on."""
    app = create_app(ProxySettings(upstream=engine_url), store=store, writer=writer)
    more = (ConnectionLimits(),) if server is bounded else ()
    with server(app, *more) as url, connect(url) as client:
        client.sendall(
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\n"
            b"upgrade: websocket\r\nsec-websocket-version: 13\r\n"
            b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\norigin: http://evil.example\r\n\r\n"
        )
        answer = Reader(client).next_answer()
    assert answer.status == 403


def test_whoever_has_the_key_may_come_by_any_name(serve_proxy: ServeProxy) -> None:
    with serve_proxy(admin_key="the-admin's-own-key", as_admin=True) as http:
        headers = {"host": "proxy.example"}
        answer = http.post("/v1/chat/completions", json=ASK, headers=headers)
    assert answer.status_code == 200


def test_a_container_comes_by_the_name_in_the_proxys_settings(serve_proxy: ServeProxy) -> None:
    with serve_proxy(allowed_hosts=["host.docker.internal"]) as http:
        headers = {"host": "host.docker.internal:4141"}
        answer = http.post("/v1/chat/completions", json=ASK, headers=headers)
    assert answer.status_code == 200
