"""Who may say which version is served, and hold everybody's calls: whoever has the control key."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.proxy.proxy_with_engine import ServeProxy
from support.proxy.servers import CONTROL, CONTROL_KEY

ADMIN = "the-admin's-long-key"
PUSHES = {
    "hold": {"ttl_s": 60, "drain_s": 0},
    "version": {"version": 77},
    "release": {},
    "canary": {"share": 0.5},
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def is_untouched(http: httpx.Client, **more: Any) -> None:
    state = http.get("/api/push", **more).json()
    assert (state["version"], state["held"]) == (0, False)


def test_in_the_open_nobody_pushes_without_a_key(serve_proxy: ServeProxy) -> None:
    with serve_proxy() as http:
        for what, body in PUSHES.items():
            for headers in ({}, CONTROL, bearer("tg-r1")):
                answer = http.post(f"/api/push/{what}", json=body, headers=headers)
                assert answer.status_code == 403, answer.text
                assert answer.json()["error"]["code"] == "control_key_needed"
                assert "TRACEGRAD_PROXY_CONTROL_KEY" in answer.json()["error"]["message"]
        assert http.get("/api/push/upstreams").status_code == 403
        is_untouched(http)


@pytest.mark.parametrize("headers", [{}, bearer("another-key-of-sorts"), bearer("tg-r1")])
def test_a_control_key_is_asked_for_in_the_open_too(
    serve_proxy: ServeProxy, headers: dict[str, str]
) -> None:
    with serve_proxy(control_key=CONTROL_KEY) as http:
        for what, body in PUSHES.items():
            answer = http.post(f"/api/push/{what}", json=body, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        is_untouched(http)
        assert http.post("/api/push/version", json={"version": 7}, headers=CONTROL).is_success
        assert http.get("/api/push").json()["version"] == 7


def test_with_an_admin_key_both_push_and_rollouts_do_not(serve_proxy: ServeProxy) -> None:
    with serve_proxy(control_key=CONTROL_KEY, admin_key=ADMIN) as http:
        minted = http.post("/api/rollouts/r1/keys", headers=bearer(ADMIN)).json()["key"]
        for version, key in enumerate((CONTROL_KEY, ADMIN), start=1):
            body = {"version": version}
            answer = http.post("/api/push/version", json=body, headers=bearer(key))
            assert answer.json()["version"] == version
        for key, status in ((minted, 403), ("another-key-of-sorts", 401)):
            answer = http.post("/api/push/version", json={"version": 9}, headers=bearer(key))
            assert answer.status_code == status
        for key in (CONTROL_KEY, ADMIN):
            assert http.get("/api/push", headers=bearer(key)).json()["version"] == 2
        assert http.get("/api/push", headers=bearer(minted)).status_code == 403


def test_the_control_key_opens_nothing_else(serve_proxy: ServeProxy) -> None:
    with serve_proxy(control_key=CONTROL_KEY, admin_key=ADMIN) as http:
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/api/feedback"),
            ("POST", "/api/events"),
            ("POST", "/api/rollouts/r1/keys"),
        ):
            assert http.request(method, path, headers=CONTROL).status_code == 401
