"""What a request says where it will stand in a header, a URL or a line of the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from urllib.parse import quote

import httpx
import pytest

from support.engines.mock_engine import MODEL, MockEngine
from support.proxy.raw_http import Answer, Reader, bounded, connect
from support.proxy.servers import HeldWriter
from tracegrad.proxy import create_app
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.http.limits import ConnectionLimits
from tracegrad.store import Store

ODD = ["\r\n", "\n", "\r", "\0", "\x01", "\x7f", "a\r\nx-evil: 1", "é", "\u2028", "😀", "\t"]
BODY = b'{"model":"mock","messages":[{"role":"user","content":"a"}],"max_tokens":5}'
PATHS = [
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/traces",
    "/api/events",
    f"/v1beta/models/{MODEL}:generateContent",
    "/rollouts/r1/v1/chat/completions",
]


@pytest.fixture(params=["open", "closed"])
def url(
    request: pytest.FixtureRequest, engine_url: str, store: Store, writer: HeldWriter
) -> Iterator[str]:
    given = {"admin_key": "the-admin's-own-key"} if request.param == "closed" else {}
    settings = ProxySettings(upstream=engine_url, **given)  # type: ignore[arg-type]
    with bounded(create_app(settings, store=store, writer=writer), ConnectionLimits()) as url:
        yield url


@pytest.mark.parametrize("key", [*ODD, "%", "%zz", "&key=\r"])
def test_a_key_that_no_header_can_hold_is_a_400(url: str, engine: MockEngine, key: str) -> None:
    for path in PATHS:
        answer = httpx.post(f"{url}{path}?key=sk%20{quote(key)}x", content=BODY)
        if any(letter < " " or letter == "\x7f" for letter in key):
            assert answer.status_code == 400, path
            assert "API key" in answer.text
        else:
            assert answer.status_code < 500, path
    assert all("x-evil" not in reported for reported in engine.headers)


HEADERS = ["authorization", "x-api-key", "x-goog-api-key", "x-tracegrad-key", "content-type"]
MORE = [
    "x-tracegrad-rollout",
    "baggage",
    "traceparent",
    "x-stainless-retry-count",
    "host",
    "origin",
]
BYTES = [b"\x01", b"\x7f", b"\xe9", b"\xff\xfe", b"Bearer \x80", b"Bearer", b"", b"a" * 5000]


def raw(url: str, request: bytes) -> Answer | None:
    with connect(url) as client:
        client.sendall(request)
        return Reader(client).answer()


@pytest.mark.parametrize("name", [*HEADERS, *MORE, "content-encoding"])
def test_no_header_is_a_500(url: str, name: str) -> None:
    for path in PATHS:
        for value in BYTES:
            first = b"" if name == "host" else b"host: localhost\r\n"
            head = f"POST {path} HTTP/1.1\r\ncontent-length: {len(BODY)}\r\n".encode()
            answer = raw(url, head + first + name.encode() + b": " + value + b"\r\n\r\n" + BODY)
            assert answer is not None
            assert answer.status < 500, (path, value, answer.body)


@pytest.mark.parametrize("odd", ODD)
def test_no_path_or_query_is_a_500_or_a_line_of_the_log(
    url: str, odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    quoted = quote(odd)
    targets = [
        f"/rollouts/{quoted}/v1/chat/completions",
        f"/v1beta/models/{quoted}:generateContent",
        f"/v1beta/models/{MODEL}:{quoted}",
        f"/v1beta/models/{MODEL}:generateContent?alt={quoted}",
        f"/v1/models/{quoted}",
        f"/{quoted}",
        f"/api/rollouts/{quoted}/keys",
    ]
    with caplog.at_level(logging.DEBUG, "tracegrad"):
        for target in targets:
            for method in ("POST", "GET"):
                answer = httpx.request(method, f"{url}{target}", content=BODY)
                assert answer.status_code < 500, target
                assert "x-evil" not in answer.headers
    assert not any("\n" in record.getMessage() for record in caplog.records)
