"""An engine on a Unix socket, behind the proxy as one on a port is."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from pydantic import ValidationError

from support.engines.mock_engine import MODEL, Answer, MockEngine
from support.proxy.proxy_with_engine import ServeProxy
from support.proxy.servers import running
from tracegrad.proxy.config import ProxySettings
from tracegrad.proxy.engine.upstreams import QueueLimits, UpstreamPool
from tracegrad.proxy.engine.upstreams.pushed_weights import weight_version
from tracegrad.store import Store

HELLO = [{"role": "user", "content": "Hello"}]


@contextmanager
def on_a_socket(engine: MockEngine, path: Path) -> Iterator[str]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        config = uvicorn.Config(engine.app(), log_level="critical", lifespan="off")
        with running(config, listener):
            yield f"unix://{path}"
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("stream", [True, False])
def test_calls_reach_it_and_are_recorded(
    stream: bool, tmp_path: Path, store: Store, serve_proxy: ServeProxy
) -> None:
    engine = MockEngine()
    engine.replies.append(Answer("At the other end of a socket."))
    with on_a_socket(engine, tmp_path / "engine.sock") as upstream:
        assert ProxySettings(upstream=upstream).upstreams == (upstream,)
        with serve_proxy(upstream=upstream) as http:
            body = {"model": MODEL, "messages": HELLO, "stream": stream}
            answer = http.post("/rollouts/r1/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    text = (
        "".join(
            json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            for line in answer.text.splitlines()
            if line.startswith("data: {") and json.loads(line[6:])["choices"]
        )
        if stream
        else answer.json()["choices"][0]["message"]["content"]
    )
    assert text == "At the other end of a socket."
    assert len(store.rollout_turns("r1")) == 1


async def test_one_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    url = f"unix://{path}"
    gone = UpstreamPool([url], queue=QueueLimits(max_wait_s=0))
    gone.open()
    with pytest.raises(Exception, match="does not answer") as caught:
        async with gone.request("GET", "/v1/models", body=None, headers={}):
            pass
    assert url in str(caught.value)
    with on_a_socket(MockEngine(), path):
        assert await weight_version(url) is None  # the mock has no such route
        state = gone.state()["servers"][0]
        deadline = time.monotonic() + 60
        while not state["up"] and time.monotonic() < deadline:
            state = gone.state()["servers"][0]
            await asyncio.sleep(0.01)
        assert state == {"url": url, "up": True, "in_flight": 0}
        assert json.loads(await gone.models())["object"] == "list"
    await gone.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("unix:engine.sock", "unix:///absolute/path"),
        ("unix://engine.sock", "unix:///absolute/path"),
        ("unix:///", "unix:///absolute/path"),
        ("unix:///tmp/" + "x" * 120, "107 bytes"),
    ],
)
def test_a_wrong_socket_is_one_clear_error(url: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ProxySettings(upstream=url)


def test_litellm_has_no_sockets() -> None:
    with pytest.raises(ValidationError, match="litellm cannot reach a Unix socket"):
        ProxySettings(upstream="unix:///tmp/engine.sock", upstream_kind="litellm")


@pytest.mark.parametrize(
    "url",
    [
        "http://user:secret-pw@127.0.0.1:8000",
        "http://:secret-pw@127.0.0.1:8000/v1",
        "http://secret-pw@127.0.0.1:8000",
        "http://127.0.0.1:8000/v1?api_key=secret-pw",
        "htp://user:secret-pw@127.0.0.1",
    ],
)
def test_credentials_in_an_engines_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ProxySettings(upstream=url)
    [error] = caught.value.errors()
    assert error["loc"] == ("upstream",)
    if not url.startswith("htp"):
        assert "upstream_api_key (TRACEGRAD_PROXY_UPSTREAM_API_KEY)" in error["msg"]
    assert "secret-pw" not in str(caught.value)
