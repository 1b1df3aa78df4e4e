"""The guard: which key opens which door."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from support.proxy.guarded_app import ADMIN, LIMIT, a_proxy
from support.proxy.key_store import SECRET, Cupboard
from tracegrad.events import Reward, RolloutStarted, Span
from tracegrad.proxy.auth.middleware import Caller, restrict_to_rollout
from tracegrad.proxy.http.errors import ApiError

Client = httpx.AsyncClient


def calling(app: FastAPI) -> Client:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@pytest.fixture
async def closed(cupboard: Cupboard) -> AsyncIterator[Client]:
    async with calling(a_proxy(ADMIN, cupboard)) as client:
        yield client


@pytest.fixture
async def open_(cupboard: Cupboard) -> AsyncIterator[Client]:
    async with calling(a_proxy(None, cupboard)) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def key(closed: Client) -> str:
    """The key of rollout r.1."""
    answer = await closed.post("/api/rollouts/r.1/keys", headers=bearer(ADMIN))
    assert answer.status_code == 201
    key: str = answer.json()["key"]
    return key


@pytest.mark.parametrize("path", ["/", "/v1/models", "/api/push", "/docs", "/metrics", "/healthz/"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(ADMIN + "x"),
        bearer(ADMIN[:-1]),
        bearer("tg-r.1"),
        bearer(f"tg-r.1.{SECRET}"),
        {"x-api-key": "wrong"},
        {"authorization": "Bearer "},
        {"authorization": f"Basic {ADMIN}"},
    ],
)
async def test_without_a_key_nothing_is_to_be_had(
    closed: Client, path: str, headers: dict[str, str]
) -> None:
    answer = await closed.post(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    reported = answer.json()
    assert reported["at"] == path, "in the shape of the path's dialect"
    assert "TRACEGRAD_API_KEY" in reported["says"]
    assert "/api/rollouts/<id>/keys" in reported["says"]
    assert ADMIN not in reported["says"]


async def test_whether_it_lives_anybody_may_ask(closed: Client) -> None:
    assert (await closed.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    "how",
    [
        {"headers": {"authorization": "Bearer {}"}},
        {"headers": {"Authorization": "bearer  {}"}},
        {"headers": {"authorization": "{}"}},
        {"headers": {"x-api-key": "{}"}},
        {"headers": {"x-goog-api-key": "{}"}},
        {"headers": {"x-tracegrad-key": "{}"}},
        {"params": {"alt": "sse", "key": "{}"}},
        {"headers": {"authorization": "Bearer unused", "x-tracegrad-key": "{}"}},
        {"headers": {"x-api-key": "placeholder", "authorization": "Bearer {}"}},
    ],
)
async def test_a_key_may_come_where_any_vendors_client_puts_it(
    closed: Client, key: str, how: dict[str, dict[str, str]]
) -> None:
    for given, rollout in ((ADMIN, None), (key, "r.1")):
        reported = {
            part: {name: text.format(given) for name, text in pairs.items()}
            for part, pairs in how.items()
        }
        answer = await closed.post("/v1/messages", **reported)  # type: ignore[arg-type]
        assert answer.status_code == 200, answer.text
        assert answer.json()["rollout"] == rollout
        assert answer.json()["bound"] is (rollout is not None)
        assert answer.json()["to_engine"] is None, "a key of ours stays here"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/messages/count_tokens"),
        ("GET", "/v1/models"),
        ("POST", "/v1beta/models/m:generateContent"),
        ("POST", "/v1/traces"),
        ("POST", "/rollouts/r.1/v1/responses"),
        ("POST", "/rollouts/r%2E1/v1beta/models/m:streamGenerateContent"),
    ],
)
async def test_a_rollouts_key_calls_models_and_posts_spans(
    closed: Client, key: str, method: str, path: str
) -> None:
    answer = await closed.request(method, path, headers=bearer(key))
    assert (answer.status_code, answer.json()["rollout"]) == (200, "r.1")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/push"),
        ("POST", "/api/push/hold"),
        ("POST", "/api/push/version"),
        ("GET", "/api/events"),
        ("POST", "/api/events/"),
        ("POST", "/rollouts/r.1/api/events"),
        ("POST", "/api/rollouts/r.1/keys"),
        ("DELETE", "/api/rollouts/r.1/keys"),
        ("GET", "/api/rollouts/r.1"),
        ("GET", "/metrics"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/ui"),
        ("GET", "/v1"),
        ("GET", "/v12/models"),
        ("GET", "/"),
        ("GET", "//v1/models"),
        ("GET", "/rollouts/r.1/"),
        ("GET", "/rollouts/r.1/../../api/push"),
        ("GET", "/rollouts/r.1%2F..%2F../v1/models"),
        ("GET", "/rollouts/r.1/rollouts/r.1/v1/models"),
        ("GET", "/rollouts/r.1%0A/v1/models"),
    ],
)
async def test_a_rollouts_key_opens_nothing_else(
    closed: Client, key: str, method: str, path: str
) -> None:
    # The path as it stands: httpx would tidy it up.
    url = httpx.URL("http://proxy").copy_with(raw_path=path.encode())
    answer = await closed.request(method, url, headers=bearer(key))
    assert answer.status_code == 403
    assert "r.1" in answer.json()["says"]
    assert "admin key" in answer.json()["says"]


@pytest.mark.parametrize(
    ("path", "header"),
    [
        ("/rollouts/r.2/v1/models", {}),
        ("/rollouts/r/v1/models", {}),
        ("/v1/models", {"x-tracegrad-rollout": "r.2"}),
        ("/rollouts/r.1/v1/models", {"x-tracegrad-rollout": "r.2"}),
        ("/v1/models", {"x-tracegrad-rollout": ""}),
    ],
)
async def test_a_rollouts_key_acts_for_no_other(
    closed: Client, key: str, path: str, header: dict[str, str]
) -> None:
    answer = await closed.get(path, headers=bearer(key) | header)
    assert answer.status_code == 403
    assert "key of rollout r.1" in answer.json()["says"]
    assert (await closed.get(path, headers=bearer(ADMIN) | header)).status_code == 200


async def test_naming_the_own_rollout_again_does_no_harm(closed: Client, key: str) -> None:
    headers = {**bearer(key), "x-tracegrad-rollout": "r.1", "baggage": "tracegrad.rollout=r.2"}
    answer = await closed.get("/rollouts/r.1/v1/models", headers=headers)
    assert answer.status_code == 200


async def test_a_revoked_key_is_a_401(closed: Client, key: str) -> None:
    gone = await closed.delete("/api/rollouts/r.1/keys", headers=bearer(ADMIN))
    assert gone.status_code == 204
    assert (await closed.get("/v1/models", headers=bearer(key))).status_code == 401


async def test_keys_are_made_for_rollouts_that_can_be(closed: Client) -> None:
    answer = await closed.post("/api/rollouts/a%20b/keys", headers=bearer(ADMIN))
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == "rollout_id"


async def test_a_store_that_is_away_is_a_503(closed: Client, cupboard: Cupboard, key: str) -> None:
    cupboard.broken = True
    unknown = await closed.get("/v1/models", headers=bearer(f"tg-r.9.{SECRET}"))
    assert unknown.status_code == 503
    assert unknown.headers["retry-after"] == "1"
    assert (await closed.get("/v1/models", headers=bearer(key))).status_code == 200


@pytest.mark.parametrize(
    ("headers", "rollout", "to_engine"),
    [
        ({}, None, None),
        (bearer("tg-r1"), "r1", None),
        (bearer("tg-r.1"), "r.1", None),
        (bearer(f"tg-r.1.{SECRET}"), "r.1", None),
        (bearer("tg-"), None, None),
        (bearer("sk-own"), None, "Bearer sk-own"),
        ({"authorization": "Basic dXNlcg=="}, None, "Basic dXNlcg=="),
        ({"x-api-key": "tg-r1"}, "r1", None),
        ({"x-api-key": "sk-own"}, None, "Bearer sk-own"),
        ({"x-goog-api-key": "tg-r1"}, "r1", None),
        ({"x-goog-api-key": "AI-own"}, None, "Bearer AI-own"),
        ({"authorization": "Bearer sk-own", "x-api-key": "tg-r1"}, "r1", "Bearer sk-own"),
        ({"authorization": "Bearer tg-r1", "x-api-key": "tg-r2"}, "r1", None),
        ({"x-tracegrad-key": "odd"}, None, None),
    ],
)
async def test_in_the_open_keys_name_rollouts_or_are_the_engines(
    open_: Client, headers: dict[str, str], rollout: str | None, to_engine: str | None
) -> None:
    reported = (await open_.post("/v1/messages", headers=headers)).json()
    assert reported == {"rollout": rollout, "bound": False, "to_engine": to_engine, "size": 0}


async def test_in_the_open_a_key_of_the_url_counts_too(open_: Client) -> None:
    for key, rollout, to_engine in (("tg-r1", "r1", None), ("AI-own", None, "Bearer AI-own")):
        reported = (
            await open_.post("/v1beta/models/m:generateContent", params={"key": key})
        ).json()
        assert (reported["rollout"], reported["to_engine"]) == (rollout, to_engine)


async def test_in_the_open_a_minted_key_only_names(open_: Client, cupboard: Cupboard) -> None:
    answer = await open_.post("/api/rollouts/r1/keys")
    assert answer.json() == {"key": "tg-r1"}
    assert cupboard.hashes == {}


async def chunked(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 100):
        yield b" " * 100


async def test_a_body_that_is_too_large_is_refused_unread(open_: Client) -> None:
    assert (await open_.post("/v1/x", content=b" " * LIMIT)).json()["size"] == LIMIT
    answer = await open_.post("/v1/x", content=b" " * (LIMIT + 1))
    assert (answer.status_code, answer.json()["at"]) == (413, "/v1/x")


async def test_a_body_of_unknown_length_is_counted(open_: Client) -> None:
    answer = await open_.post("/v1/x", content=chunked(LIMIT))
    assert answer.json()["size"] == LIMIT
    answer = await open_.post("/v1/x", content=chunked(LIMIT + 100))
    assert answer.status_code == 413
    assert "larger than" in answer.json()["says"]


def test_a_rollouts_key_posts_for_its_own_alone() -> None:
    caller = Caller("mine", bound=True)
    span = Span(trace_id="1" * 32, span_id="1" * 16, name="s", start_ns=0, end_ns=1)
    opened = RolloutStarted(rollout_id="mine")
    theirs = Reward(rollout_id="theirs", value=1.0)
    kept = restrict_to_rollout([opened, span], caller)
    assert [fact.rollout_id for fact in kept] == ["mine", "mine"]
    with pytest.raises(ApiError, match="rollout theirs") as caught:
        restrict_to_rollout([opened, theirs], caller)
    assert caught.value.status == 403
    anybody = [opened, span, theirs]
    assert restrict_to_rollout(anybody, Caller()) is anybody
