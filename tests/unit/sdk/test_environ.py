"""The environment as a carrier of the rollout: for this process's clients, and for an agent's."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.sdk.fake_proxy import FakeProxy
from tracegrad import rollout, trace
from tracegrad.client_environ import client_variables, direct_variables
from tracegrad.key_derivation import derive_key

# What a client without httpx, requests and aiohttp does; also in a process of its own.
RAW_CALL = """
import http.client, os
from urllib.parse import urlsplit
url = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(url.netloc)
key = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
connection.request("POST", url.path + "/chat/completions", "{}", key)
assert connection.getresponse().status == 200
"""
BESIDE = "is open beside this one, and os.environ is one for the whole process"


def raw_call() -> None:
    exec(RAW_CALL, {})


@pytest.fixture(autouse=True)
def theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has set."""
    for name, value in {
        "OPENAI_BASE_URL": "http://their-server/v1",
        "OPENAI_API_KEY": "sk-theirs",
        "ANTHROPIC_AUTH_TOKEN": "sk-ant-theirs",
        "GOOGLE_API_KEY": "theirs",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_a_client_that_nothing_is_wrapped_in_lands_in_the_rollout(proxy: FakeProxy) -> None:
    before = dict(os.environ)

    @trace(environ=True, reward=True)
    def solve() -> float:
        raw_call()
        return 1.0

    solve()
    [opened] = proxy.events("rollout_started")
    [call] = proxy.chats
    assert call.path == f"/rollouts/{opened['rollout_id']}/v1/chat/completions"
    assert call.headers["authorization"] == f"Bearer tg-{opened['rollout_id']}"
    assert dict(os.environ) == before


def test_each_vendors_variables_lead_to_the_rollout(proxy: FakeProxy) -> None:
    with rollout(environ=True) as r:
        base = f"{proxy.url}/rollouts/{r.id}"
        assert os.environ["OPENAI_API_BASE"] == os.environ["OPENAI_BASE_URL"] == f"{base}/v1"
        for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE", "GOOGLE_GEMINI_BASE_URL"):
            assert os.environ[name] == base
        for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"):
            assert os.environ[name] == r.api_key
        # A real key that a client would send first.
        assert not {"ANTHROPIC_AUTH_TOKEN", "GOOGLE_API_KEY"} & os.environ.keys()
    assert os.environ["GOOGLE_API_KEY"] == "theirs"
    assert "ANTHROPIC_BASE_URL" not in os.environ


def test_a_proxy_on_this_machine_is_called_without_another_one(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "own.example, 10.0.0.1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    wanted = dict.fromkeys(("no_proxy", "NO_PROXY"), "own.example,10.0.0.1,127.0.0.1")
    with rollout(environ=True) as r:
        assert wanted.items() <= os.environ.items()
        with rollout() as inner:
            assert wanted.items() <= inner.environ.items()
        assert wanted.items() <= r.environ.items()
    assert os.environ["no_proxy"] == "own.example, 10.0.0.1"
    assert "NO_PROXY" not in os.environ
    with rollout() as plain:
        assert wanted.items() <= plain.environ.items()
    assert direct_variables("https://elsewhere.example/v1", {}) == {}


def test_the_page_names_every_variable() -> None:
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
    said = page[page.index("### Clients that read the environment") :]
    missing = [name for name in client_variables("b/v1", "k") if f"`{name}`" not in said]
    assert missing == []


def test_what_was_there_comes_back_whatever_happens_but_for_what_the_agent_set(
    proxy: FakeProxy,
) -> None:
    @trace(environ=True)
    def fail() -> None:
        os.environ["OPENAI_API_KEY"] = "the agent's"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.environ["OPENAI_BASE_URL"] == "http://their-server/v1"
    assert os.environ["OPENAI_API_KEY"] == "the agent's"


def test_a_rollout_inside_sets_its_own(proxy: FakeProxy) -> None:
    with rollout(environ=True) as outer:
        with rollout() as inner:  # its clients would else call the outer one
            raw_call()
        raw_call()
    paths = [call.path.split("/")[2] for call in proxy.chats]
    assert paths == [inner.id, outer.id]
    assert os.environ["OPENAI_BASE_URL"] == "http://their-server/v1"


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_a_rollout_beside_one_that_has_the_environment_is_refused(
    proxy: FakeProxy, first: bool, second: bool
) -> None:
    ran = []

    async def attempt(environ: bool, opened: asyncio.Event, go_on: asyncio.Event) -> None:
        async with rollout(environ=environ):
            ran.append(environ)
            opened.set()
            await go_on.wait()

    async def both() -> None:
        opened, go_on = asyncio.Event(), asyncio.Event()
        earlier = asyncio.create_task(attempt(first, opened, go_on))
        await opened.wait()
        during = dict(os.environ)
        with pytest.raises(ValueError, match=BESIDE):
            await asyncio.create_task(attempt(second, asyncio.Event(), go_on))
        assert dict(os.environ) == during, "the other one still has it"
        go_on.set()
        await earlier
        await attempt(second, asyncio.Event(), go_on)  # one after the other

    asyncio.run(both())
    assert ran == [first, second]
    assert len(proxy.events("rollout_started")) == 2, "what is refused leaves no rollout"


def test_rollouts_without_the_option_run_beside_each_other(proxy: FakeProxy) -> None:
    with rollout():
        threads = [threading.Thread(target=lambda: rollout().__enter__()) for _ in range(3)]
        for each in threads:
            each.start()
            each.join()
    assert len(proxy.events("rollout_started")) == 4


def test_one_inside_that_is_open_longer_puts_back_what_was_there_before_both(
    proxy: FakeProxy,
) -> None:
    before = dict(os.environ)
    inner = rollout()
    with rollout(environ=True):
        task = copy_context()  # it outlives what started it
        task.run(inner.__enter__)
        held = dict(os.environ)
    assert dict(os.environ) == held != before
    task.run(inner.__exit__, None, None, None)
    assert dict(os.environ) == before


def test_a_generator_that_nobody_closes_keeps_the_environment_no_longer_than_it_lives(
    proxy: FakeProxy,
) -> None:
    def numbers() -> Iterator[int]:
        with rollout(environ=True):
            yield from range(9)

    left = numbers()
    copy_context().run(next, left)
    with pytest.raises(ValueError, match=BESIDE), rollout():
        pass
    del left
    assert os.environ["OPENAI_BASE_URL"] == "http://their-server/v1"
    with rollout(environ=True):
        pass


def steps() -> Iterator[int]:
    yield 1


async def async_steps() -> AsyncIterator[int]:
    yield 1


class Steps:
    def __call__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (steps, "steps is a generator"),
        (async_steps, "async_steps is a generator"),
        (functools.partial(steps), "is a generator"),
        (Steps(), "Steps is a generator"),
        (contextmanager(steps), "steps is a context manager"),
        (asynccontextmanager(async_steps), "async_steps is a context manager"),
    ],
)
def test_what_others_run_between_the_steps_of_gets_no_environment(
    function: Callable[..., Any], kind: str
) -> None:
    with pytest.raises(TypeError, match=kind) as refused:
        trace(environ=True)(function)
    for fix in ("on a function that runs it to its end", "base_url=rollout.base_url"):
        assert fix in str(refused.value)


def test_a_function_that_runs_a_generator_to_its_end_may_have_the_environment(
    proxy: FakeProxy,
) -> None:
    @trace  # a span of the rollout around it
    def calling() -> Iterator[int]:
        raw_call()
        yield 1

    @trace(environ=True)
    def solve() -> list[int]:
        return list(calling())

    assert solve() == [1]
    [opened] = proxy.events("rollout_started")
    assert proxy.chats[0].path.split("/")[2] == opened["rollout_id"]
    assert os.environ["OPENAI_BASE_URL"] == "http://their-server/v1"


def test_a_forked_child_is_in_its_own_rollout_alone(proxy: FakeProxy) -> None:
    opened, leave = threading.Event(), threading.Event()

    def beside() -> None:
        with rollout():
            opened.set()
            leave.wait()

    thread = threading.Thread(target=beside)
    thread.start()
    opened.wait()
    if (child := os.fork()) == 0:
        try:
            with rollout(environ=True):
                raw_call()
        finally:
            os._exit(0 if os.environ["OPENAI_API_KEY"] == "sk-theirs" else 1)
    status = os.waitpid(child, 0)[1]
    leave.set()
    thread.join()
    assert (status, len(proxy.chats)) == (0, 1)


def test_an_agents_process_gets_the_rollout_and_not_the_admins_key(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEGRAD_API_KEY", "the-admins-own")
    with rollout() as r:
        given = r.environ
        subprocess.run([sys.executable, "-c", RAW_CALL], env=given, check=True)
    [call] = proxy.chats
    assert call.path.startswith(f"/rollouts/{r.id}/")
    assert call.headers["authorization"] == f"Bearer {derive_key('the-admins-own', r.id)}"
    assert "TRACEGRAD_API_KEY" not in given
    assert given["PATH"] == os.environ["PATH"]
    assert os.environ["OPENAI_API_KEY"] == "sk-theirs"


def test_what_a_held_out_rollouts_process_opens_is_held_out(proxy: FakeProxy) -> None:
    code = "import tracegrad\nwith tracegrad.rollout('inside'): pass\ntracegrad.flush()"
    with rollout(environ=True, held_out=True) as r:
        assert os.environ["TRACEGRAD_HELD_OUT"] == "1"
    assert "TRACEGRAD_HELD_OUT" not in os.environ
    subprocess.run([sys.executable, "-c", code], env=r.environ, check=True)
    [_, inside] = proxy.events("rollout_started")
    assert (inside["task_id"], inside["held_out"]) == ("inside", True)


def test_where_another_rollouts_key_is_set_the_agents_own_stays(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEGRAD_API_KEY", derive_key("the-admins-own", "another"))
    with rollout(environ=True):
        assert os.environ["OPENAI_API_KEY"] == "sk-theirs"


def test_a_wrapped_client_made_inside_is_attributed_once(proxy: FakeProxy) -> None:
    with rollout(environ=True) as r:
        httpx.post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json={})
    [call] = proxy.chats
    assert call.path == f"/rollouts/{r.id}/v1/chat/completions"
    assert call.headers["x-tracegrad-rollout"] == r.id
