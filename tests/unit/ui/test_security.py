"""Who gets in, which forms are taken, and what every answer says to the browser."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

from tracegrad.ui import security
from tracegrad.ui.security import CONTENT_SECURITY_POLICY, Sessions, local_path

from .conftest import token_in

KEY = "an-admin-key-of-32-random-characters"
Browse = Callable[..., TestClient]


def test_every_answer_has_the_headers_that_keep_scripts_out(browse: Browse) -> None:
    client = browse()
    for path in ("/ui/rollouts", "/ui/nowhere", "/ui/static/ui.css", "/ui/rollouts?since=x"):
        headers = client.get(path).headers
        assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert "unsafe" not in CONTENT_SECURITY_POLICY


def test_pages_have_no_inline_script_or_style(browse: Browse) -> None:
    page = browse().get("/ui/rollouts").text
    assert "<style" not in page
    assert "style=" not in page
    assert "<script>" not in page
    assert " on" not in page.replace(" one", "").replace(" once", "").replace(" only", "")


def test_a_key_gives_a_session_that_does_not_hold_it(browse: Browse) -> None:
    client = browse(KEY)
    form = client.get("/ui/login?next=%2Fui%2Frollouts%3Ftask%3Dt1").text
    fields = {"csrf": token_in(form), "key": KEY, "next": "/ui/rollouts?task=t1"}
    answer = client.post("/ui/login", data=fields, follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/ui/rollouts?task=t1"
    cookie = answer.headers["set-cookie"]
    assert KEY not in cookie
    for part in ("HttpOnly", "SameSite=strict", "Path=/ui", "Max-Age="):
        assert part in cookie
    assert "Secure" not in cookie
    assert Sessions(KEY).is_valid(client.cookies[Sessions(KEY).cookie])


def test_a_session_is_sent_over_https_alone_where_it_was_given_so(browse: Browse) -> None:
    client = browse(KEY)
    fields = {"csrf": token_in(client.get("/ui/login").text), "key": KEY}
    sent = client.post(
        "/ui/login", data=fields, headers={"x-forwarded-proto": "https"}, follow_redirects=False
    )
    assert "Secure" in sent.headers["set-cookie"]


def test_a_wrong_key_gives_none(browse: Browse) -> None:
    client = browse(KEY)
    fields = {"csrf": token_in(client.get("/ui/login").text), "key": "guessed"}
    answer = client.post("/ui/login", data=fields)
    assert answer.status_code == 401
    assert "not this proxy's admin key" in answer.text.replace("&#39;", "'")
    assert Sessions(KEY).cookie not in client.cookies


def test_sessions_end_and_cannot_be_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(KEY)
    cookie = sessions.start()
    ends, nonce, signature = cookie.split(".")
    assert sessions.is_valid(cookie)
    assert not Sessions("another").is_valid(cookie)
    assert not Sessions(None).is_valid(cookie)
    assert not sessions.is_valid(f"{int(ends) + 1}.{nonce}.{signature}")
    for made_up in ("", ".", "..", "x.y.z", f"{ends}.{nonce}.", f"{ends}.{signature}"):
        assert not sessions.is_valid(made_up)
    # The token of its forms is no session, and no other session's.
    assert sessions.form_token(cookie) != sessions.form_token(sessions.start())
    monkeypatch.setattr(security.time, "time", lambda: float(ends) + 1)
    assert not sessions.is_valid(cookie)


@pytest.mark.parametrize("admin_key", [None, KEY])
def test_a_form_without_the_token_of_this_browser_is_refused(
    browse: Browse, admin_key: str | None
) -> None:
    client, other = browse(admin_key), browse(admin_key)
    other_token = token_in(browse(KEY).get("/ui/login").text)
    client.get("/ui/rollouts")
    for fields in ({}, {"csrf": ""}, {"csrf": other_token}, {"csrf": "é"}):
        answer = client.post("/ui/logout", data=fields, follow_redirects=False)
        assert answer.status_code == 403, fields
    # A browser without any cookie of ours, as another site's form would send it.
    assert other.post("/ui/logout", data={"csrf": ""}).status_code == 403


def test_a_form_of_another_site_is_refused_with_the_token(browse: Browse) -> None:
    client = browse(KEY)
    fields = {"csrf": token_in(client.get("/ui/login").text), "key": KEY}
    answer = client.post("/ui/login", data=fields, headers={"sec-fetch-site": "cross-site"})
    assert answer.status_code == 403


def test_logging_out_takes_the_session_away(browse: Browse) -> None:
    client = browse(KEY)
    client.post("/ui/login", data={"csrf": token_in(client.get("/ui/login").text), "key": KEY})
    page = client.get("/ui/rollouts").text
    assert "Log out" in page
    answer = client.post("/ui/logout", data={"csrf": token_in(page)}, follow_redirects=False)
    assert answer.headers["location"] == "/ui/login"
    assert Sessions(KEY).cookie not in client.cookies


@pytest.mark.parametrize(
    "given",
    [
        "https://evil.example/",
        "//evil.example",
        "/api/events",
        "/ui\\..\\x",
        "javascript:x",
        "/uix",
        "/ui/%2e%2e/v1/models",
        "/ui/.%2E/v1/models",
        "/ui/%5c..",
    ],
)
def test_a_form_leads_on_to_pages_of_ours_alone(given: str) -> None:
    assert local_path(given) == "/ui"
    assert local_path("/ui/rollouts?task=a") == "/ui/rollouts?task=a"
