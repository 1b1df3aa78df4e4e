"""The web page behind the proxy's authentication."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from tracegrad.key_derivation import CALLS, EVENTS, derive_key
from tracegrad.proxy import create_app
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.http.request_body import MemoryBudget
from tracegrad.store import GroupCommitWriter, Store
from tracegrad.ui.security import MOST_FORM_BYTES, Sessions

pytestmark = pytest.mark.databases("sqlite")

KEY = "the-admin's-own-key-of-this-test"
HTML = {"accept": "text/html,application/xhtml+xml"}


def browser(store: Store, admin_key: str | None) -> TestClient:
    settings = ProxySettings(admin_key=admin_key)  # type: ignore[arg-type]
    app = create_app(settings, store=store, writer=GroupCommitWriter(store))
    return TestClient(app, base_url="http://127.0.0.1:4141", headers=HTML, follow_redirects=False)


def test_the_address_of_the_proxy_leads_to_the_page(store: Store) -> None:
    client = browser(store, None)
    answer = client.get("/")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/ui"
    assert client.get("/", follow_redirects=True).url.path == "/ui/rollouts"


def test_an_open_proxy_shows_the_page_and_not_to_pages_from_elsewhere(store: Store) -> None:
    client = browser(store, None)
    assert client.get("/ui/rollouts").status_code == 200
    assert client.get("/ui/rollouts", headers={"host": "evil.example"}).status_code == 403
    framed = {"sec-fetch-site": "cross-site", "sec-fetch-dest": "iframe"}
    assert client.get("/ui/rollouts", headers=framed).status_code == 403
    # An agent's key names its rollout, and opens nothing.
    agent = {"authorization": "Bearer tg-r1"}
    assert client.get("/ui/rollouts", headers=agent).status_code == 403


def test_without_a_session_a_person_is_led_to_the_form_and_a_program_is_told(
    store: Store,
) -> None:
    client = browser(store, KEY)
    answer = client.get("/ui/rollouts?task=a%26b")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/ui/login?next=%2Fui%2Frollouts%3Ftask%3Da%2526b"
    assert client.get("/").headers["location"].startswith("/ui/login")
    assert client.get("/ui/rollouts", headers={"accept": "*/*"}).status_code == 401
    assert client.post("/ui/logout").status_code == 401
    assert client.get("/ui/login").status_code == 200
    assert client.get("/ui/static/ui.css").status_code == 200
    script = client.get("/ui/feedback.js", headers={"origin": "https://app.example"})
    assert script.status_code == 200
    assert script.headers["access-control-allow-origin"] == "*"
    assert script.headers["cross-origin-resource-policy"] == "cross-origin"
    assert "immutable" not in script.headers["cache-control"]
    assert client.get("/ui/feedback.js/x", headers={"accept": "*/*"}).status_code == 401
    assert client.get("/ui/session", headers={"accept": "text/plain"}).status_code == 401


def test_a_session_opens_the_page_and_nothing_else(store: Store) -> None:
    client = browser(store, KEY)
    client.cookies.set(Sessions(KEY).cookie, Sessions(KEY).start())
    assert client.get("/ui/rollouts").status_code == 200
    assert client.get("/ui/session").status_code == 204
    for path in ("/api/push", "/metrics", "/openapi.json", "/api/feedback", "/v1/models"):
        assert client.get(path, headers={"accept": "*/*"}).status_code == 401, path
    client.cookies.clear()
    client.cookies.set(Sessions(KEY).cookie, Sessions("another key").start())
    assert client.get("/ui/rollouts").status_code == 303


def test_the_admin_key_itself_opens_the_page(store: Store) -> None:
    client = browser(store, KEY)
    assert client.get("/ui/rollouts", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


@pytest.mark.parametrize("scope", [CALLS, EVENTS])
def test_a_rollouts_key_never_opens_the_page(store: Store, scope: str) -> None:
    client = browser(store, KEY)
    key = derive_key(KEY, "r1", scope)  # type: ignore[arg-type]
    for path in ("/ui", "/ui/", "/ui/rollouts", "/ui/rollouts/r1", "/ui/session", "/"):
        answer = client.get(path, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 403, path


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_without_a_key_pages_are_read_and_only_the_form_is_sent(store: Store, method: str) -> None:
    client = browser(store, KEY)
    for path in ("/healthz", "/ui/static/ui.css", "/ui/static/nothing"):
        assert client.request(method, path).status_code == 401, path
    without_token = client.request(method, "/ui/login")
    assert without_token.status_code == (403 if method == "POST" else 401)
    for path in ("/healthz", "/ui/login"):
        assert client.get(path).status_code == 200


@pytest.mark.parametrize("admin_key", [None, KEY])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/ui/login"), ("GET", "/ui/static/ui.css"), ("GET", "/healthz")]
)
def test_a_large_body_is_refused_before_it_takes_memory(
    store: Store, admin_key: str | None, method: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    async def acquire(_: MemoryBudget, __: str, ___: int, size: int) -> None:
        taken.append(size)

    monkeypatch.setattr(MemoryBudget, "acquire", acquire)
    monkeypatch.setattr(MemoryBudget, "give_back", lambda *_: None)
    client = browser(store, admin_key)
    declared = client.request(method, path, content=b"a" * (MOST_FORM_BYTES + 1))
    assert declared.status_code == 413
    assert "64 KiB" in declared.text
    assert not taken
    in_chunks = client.request(method, path, content=iter([b"a" * 1000, b"a" * MOST_FORM_BYTES]))
    assert in_chunks.status_code == 413
    assert sum(taken) <= MOST_FORM_BYTES


def test_a_session_is_found_among_odd_cookies(store: Store) -> None:
    client = browser(store, KEY)
    mine = f"{Sessions(KEY).cookie}={Sessions(KEY).start()}"
    for sent in (f'prefs={{"a":1}}; {mine}', f"a b=c; {mine}; ;=", f"{mine}; x=@,["):
        answer = client.get("/ui/rollouts", headers={"cookie": sent})
        assert answer.status_code == 200, sent


def test_two_proxies_of_one_host_do_not_log_each_other_out(store: Store) -> None:
    client = browser(store, KEY)
    other = Sessions("the key of a proxy on another port")
    client.cookies.set(Sessions(KEY).cookie, Sessions(KEY).start())
    client.cookies.set(other.cookie, other.start())
    assert client.get("/ui/rollouts").status_code == 200
    assert KEY not in Sessions(KEY).cookie


def test_the_page_without_its_slash_is_found_and_keeps_the_scheme(store: Store) -> None:
    client = browser(store, None)
    answer = client.get("/ui")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/ui/rollouts"
