"""LLM calls name their rollout, whichever library sends them, and only to the proxy."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import httpx
import httpx2
import openai
import pytest
import requests

from support.sdk.fake_proxy import FakeProxy, serve
from tracegrad import http_patching, rollout, trace, turn

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}]}


def openai_sync(url: str, **headers: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", default_headers=headers) as agent:
        answer = agent.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == "four"


async def openai_async(url: str, **headers: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", default_headers=headers)
    async with client as agent:
        await agent.chat.completions.create(**ASK)


def with_httpx(url: str, **headers: str) -> None:
    httpx.post(f"{url}/v1/chat/completions", json=ASK, headers=headers)


def with_httpx2(url: str, **headers: str) -> None:
    httpx2.post(f"{url}/v1/chat/completions", json=ASK, headers=headers)


async def with_httpx_async(url: str, **headers: str) -> None:
    async with httpx.AsyncClient() as client:
        await client.post(f"{url}/v1/chat/completions", json=ASK, headers=headers)


def with_requests(url: str, **headers: str) -> None:
    requests.post(f"{url}/v1/chat/completions", json=ASK, headers=headers, timeout=60)


async def with_aiohttp(url: str, **headers: str) -> None:
    async with (
        aiohttp.ClientSession(headers={"x-session": "kept"}) as session,
        session.post(f"{url}/v1/chat/completions", json=ASK, headers=headers) as answer,
    ):
        await answer.read()


async def with_aiohttp_base(url: str, **headers: str) -> None:
    async with (
        aiohttp.ClientSession(base_url=url, headers=headers) as session,
        session.post("/v1/chat/completions", json=ASK) as answer,
    ):
        await answer.read()


Sender = Callable[..., Coroutine[Any, Any, None] | None]
every_library = pytest.mark.parametrize(
    "send",
    [
        openai_sync,
        openai_async,
        with_httpx,
        with_httpx2,
        with_httpx_async,
        with_requests,
        with_aiohttp,
        with_aiohttp_base,
    ],
)


def run(send: Sender, url: str, **headers: str) -> None:
    sent = send(url, **headers)
    if sent is not None:
        asyncio.run(sent)


@every_library
def test_a_call_inside_a_rollout_names_it(proxy: FakeProxy, send: Sender) -> None:
    with rollout() as r:
        run(send, proxy.url)
    (call,) = proxy.chats
    (span,) = proxy.spans()
    assert call.headers["x-tracegrad-rollout"] == r.id
    assert call.headers["baggage"] == f"tracegrad.rollout={r.id}"
    sampled = re.fullmatch(r"00-(\w{32})-(\w{16})-0[13]", call.headers["traceparent"])
    assert sampled is not None
    assert sampled.groups() == (span.trace_id.hex(), span.span_id.hex())
    if send is with_aiohttp:
        assert call.headers["x-session"] == "kept"


@every_library
def test_other_calls_stay_as_they_are(proxy: FakeProxy, send: Sender) -> None:
    elsewhere, server = serve()
    try:
        with rollout():
            run(send, elsewhere.url)
        run(send, proxy.url)
    finally:
        server.shutdown()
        server.server_close()
    for (call,) in (elsewhere.chats, proxy.chats):
        assert not {"x-tracegrad-rollout", "baggage", "traceparent"} & set(call.headers)


@every_library
def test_the_callers_own_headers_stay(proxy: FakeProxy, send: Sender) -> None:
    theirs = {"baggage": "user=7", "traceparent": f"00-{1:032x}-{2:016x}-01"}
    with rollout() as r:
        run(send, proxy.url, **theirs)
        run(send, proxy.url, **{"x-tracegrad-rollout": "mine"})
        run(send, proxy.url, authorization="Bearer tg-another")
    first, second, third = proxy.chats
    assert first.headers["baggage"] == f"user=7,tracegrad.rollout={r.id}"
    assert first.headers["traceparent"] == theirs["traceparent"]
    assert second.headers["x-tracegrad-rollout"] == "mine"
    assert "x-tracegrad-rollout" not in third.headers
    assert "traceparent" in third.headers


@every_library
def test_a_call_says_the_state_of_the_environment(proxy: FakeProxy, send: Sender) -> None:
    with turn(state="board 7"):
        run(send, proxy.url)
    with rollout():
        with turn(state="board 7"):
            run(send, proxy.url)
            run(send, proxy.url, **{"x-tracegrad-state": "mine"})
            run(send, proxy.url, authorization="Bearer tg-another")
            with turn(state=None):
                run(send, proxy.url)
            with rollout():
                run(send, proxy.url)
        run(send, proxy.url)
    reported = [call.headers.get("x-tracegrad-state") for call in proxy.chats]
    assert reported == [None, "board 7", "mine", "board 7", None, None, None]


@every_library
def test_a_call_says_which_agent_makes_it(proxy: FakeProxy, send: Sender) -> None:
    with turn(agent="nobody's"):
        run(send, proxy.url)
    with rollout(), turn(agent="planner", state="board 7"):
        with turn(agent="grün 50%"):
            run(send, proxy.url)
        with turn(state=None):
            run(send, proxy.url)
        run(send, proxy.url, **{"x-tracegrad-agent": "mine"})
        with rollout():
            run(send, proxy.url)
    said = [
        (call.headers.get("x-tracegrad-agent"), call.headers.get("x-tracegrad-state"))
        for call in proxy.chats
    ]
    assert said == [
        (None, None),
        ("gr%C3%BCn 50%25", "board 7"),
        ("planner", None),
        ("mine", "board 7"),
        (None, None),
    ]


@pytest.mark.parametrize("wrong", ["", 7])
def test_an_agent_has_a_name(wrong: Any) -> None:
    with pytest.raises(ValueError, match="agent: expected a non-empty string"):
        turn(agent=wrong)


def test_states_that_are_no_short_text_become_a_digest(proxy: FakeProxy) -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError("broken")

        def __reduce__(self) -> str:
            raise RuntimeError("broken")

    class Mapping(dict[str, int]):
        def items(self) -> Any:
            raise RuntimeError("broken")

    states: list[object] = [
        {"x": 1, "y": {2, 3}}, {"y": {3, 2}, "x": 1}, {"x": 2}, "x" * 129, "grün", "a\nb", " a", "",
        10**5000, "\ud800", Hostile(), Mapping(x=1),
    ]  # fmt: skip
    with rollout():
        for state in states:
            with turn(state=state):
                openai_sync(proxy.url)
    reported = [call.headers.get("x-tracegrad-state") for call in proxy.chats]
    assert len(reported) == len(states), "every call went out"
    assert reported[0] == reported[1] != reported[2]
    digests = [key for key in reported if key is not None]
    assert all(re.fullmatch(r"blake2b:[0-9a-f]{32}", key) for key in digests)
    assert all(key is not None for key in reported[:8])
    assert len(set(reported[1:8])) == 7


def test_every_name_of_loopback_is_the_same_proxy(proxy: FakeProxy) -> None:
    with rollout() as r:
        openai_sync(proxy.url.replace("127.0.0.1", "localhost"))
    assert proxy.chats[0].headers["x-tracegrad-rollout"] == r.id


def test_wrapping_twice_is_wrapping_once() -> None:
    http_patching.install()
    before = httpx2.Client.send, httpx2.AsyncClient.send, requests.Session.send
    http_patching.install()
    assert before == (httpx2.Client.send, httpx2.AsyncClient.send, requests.Session.send)
    assert asyncio.iscoroutinefunction(httpx2.AsyncClient.send)


def test_a_call_goes_out_even_if_it_cannot_be_named(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(url: str) -> dict[str, str]:
        raise RuntimeError("broken")

    monkeypatch.setattr("tracegrad.context.attribution_headers", broken)
    with rollout():
        openai_sync(proxy.url)
        asyncio.run(with_aiohttp(proxy.url))
    assert len(proxy.chats) == 2
    assert "could not name the rollout" in caplog.text


async def test_concurrent_agents_are_kept_apart(proxy: FakeProxy) -> None:
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none") as agent:

        @trace(task=lambda i: str(i))
        async def solve(i: int) -> None:
            for _ in range(2):
                await agent.chat.completions.create(**ASK, user=str(i))

        await asyncio.gather(*(solve(i) for i in range(8)))
    opened = {e["rollout_id"]: e["task_id"] for e in proxy.events("rollout_started")}
    named = [(opened[c.headers["x-tracegrad-rollout"]], c.body) for c in proxy.chats]
    assert len(named) == 16
    assert all(f'"user":"{task}"'.encode() in body for task, body in named)


def test_threads_have_rollouts_of_their_own(proxy: FakeProxy) -> None:
    @trace(task=lambda i: str(i))
    def solve(i: int) -> None:
        barrier.wait(60)
        openai_sync(proxy.url, **{"x-i": str(i)})

    barrier = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(solve, range(4)))
    opened = {e["rollout_id"]: e["task_id"] for e in proxy.events("rollout_started")}
    seen = {(opened[c.headers["x-tracegrad-rollout"]], c.headers["x-i"]) for c in proxy.chats}
    assert seen == {(str(i), str(i)) for i in range(4)}


LAZY = """
import inspect, sys
import tracegrad

def ask(library):
    with tracegrad.rollout() as r:
        assert library not in sys.modules
        module = __import__(library)
        module.post(f"{r.url}/v1/chat/completions", json={}, headers={"x-mine": r.id})
        assert "exec_module" not in vars(module.__loader__)
        assert inspect.getsource(module)

ask("httpx")
ask("requests")
with tracegrad.rollout():
    import aiohttp
assert hasattr(aiohttp.ClientSession._request, "_tracegrad")
try:
    import httpx2.no_such_module
except ModuleNotFoundError:
    pass
"""


DELEGATES = """
import sys
import tracegrad
from importlib.abc import MetaPathFinder

class AsksAll(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)):
                return spec

with tracegrad.rollout():
    sys.meta_path.insert(0, AsksAll())
    import requests
print(hasattr(requests.Session.send, "__wrapped__"))
"""


def test_a_finder_that_asks_all_others_is_no_end_of_imports(proxy: FakeProxy) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DELEGATES], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "True\n")


def test_a_library_that_is_imported_inside_the_first_rollout_names_it(proxy: FakeProxy) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAZY], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(proxy.chats) == 2
    for call in proxy.chats:
        assert call.headers["x-tracegrad-rollout"] == call.headers["x-mine"]
