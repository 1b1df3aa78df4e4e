"""The SDK never raises into the agent, never waits for the network on its time, never loses what
was said, and counts what it had to drop: with hostile values, threads, tasks, forks, signals, and a
proxy that is down, hangs, fails or resets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import tracegrad
from support.sdk.fake_proxy import FakeProxy, serve
from support.sdk.hostile_values import ERRORS, USABLE_REWARD, VALUES
from tracegrad import context, exporter, reward, rollout, telemetry, thread_patching, trace

# What the proxy does while the agent runs. Afterwards it works.
MODES = ["ok", "hang", "reset", 503, 500, 401, 404]


class Networked(BaseException):
    """The agent's own thread used the network. No `except Exception` hides it."""


_watched: set[int] = set()


def _watch(name: str) -> Callable[..., Any]:
    original = getattr(socket.socket, name)

    def method(self: socket.socket, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() in _watched:
            raise Networked(name)
        return original(self, *args, **kwargs)

    return method


@pytest.fixture(autouse=True, scope="module")
def _no_network_in_watched_threads() -> Iterator[None]:
    """A socket that would block for ever is one that is never touched: no clock is needed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex", "send", "sendall", "recv", "recv_into", "accept"):
            patch.setattr(socket.socket, name, _watch(name), raising=False)
        yield


@contextlib.contextmanager
def on_the_agents_time() -> Iterator[None]:
    _watched.add(threading.get_ident())
    try:
        yield
    finally:
        _watched.discard(threading.get_ident())


@contextlib.contextmanager
def a_process(mode: str | int, key: str | None) -> Iterator[FakeProxy]:
    """Exporters, journal and proxy of its own, as a process of its own would have them."""
    fake, server = serve()
    fake.mode = mode
    exporters: dict[str, exporter.EventExporter] = {}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "_exporters", exporters)
        patch.setattr(telemetry, "_private", {})
        patch.setenv("TRACEGRAD_JOURNAL", folder)
        patch.setenv("TRACEGRAD_URL", fake.url)
        if key is not None:
            patch.setenv("TRACEGRAD_API_KEY", key)
        try:
            yield fake
        finally:
            fake.mode = "ok"
            for each in exporters.values():
                each.shutdown()
            server.shutdown()
            server.server_close()


def once_each(fake: FakeProxy) -> Counter[str]:
    """How many of each kind arrived; none of them twice."""
    kinds: Counter[str] = Counter()
    ids: Counter[tuple[str, ...]] = Counter()
    for event in (e for c in fake.sent_to("/api/events") for e in json.loads(c.body)["events"]):
        kinds[event["type"]] += 1
        own = (event["rollout_id"], event.get("reward_id", ""))
        ids[(event["type"], *own)] += 1
    for call in fake.sent_to("/v1/traces"):
        for resource in ExportTraceServiceRequest.FromString(call.body).resource_spans:
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                kinds["span"] += 1
                ids["span", span.span_id.hex()] += 1
    assert set(ids.values()) <= {1}
    return kinds


def agents(returned: object, error: BaseException | None) -> dict[str, Callable[..., Any]]:
    """The same agent as every kind of function; calling one gives what it returned or raises."""

    def plain(*args: object, **kwargs: object) -> Any:
        if error is not None:
            raise error
        return returned

    async def coroutine(*args: object, **kwargs: object) -> Any:
        await asyncio.sleep(0)
        return plain()

    def generator(*args: object, **kwargs: object) -> Iterator[Any]:
        yield 1
        return plain()

    def run_generator(*args: object, **kwargs: object) -> Any:
        steps = trace(generator)(*args, **kwargs)
        try:
            while True:
                next(steps)
        except StopIteration as stop:
            return stop.value

    def explicit(*args: object, **kwargs: object) -> Any:
        with rollout(input=args, tags={"tag": returned, "kw": kwargs}) as r:
            r.reward(0.5, name="format")
            return plain()

    def in_a_thread(*args: object, **kwargs: object) -> Any:
        found: list[Any] = []

        def body() -> None:
            with on_the_agents_time():
                try:
                    found.append((trace(plain)(*args, **kwargs), None))
                except BaseException as raised:
                    found.append((None, raised))

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        if found[0][1] is not None:
            raise found[0][1]
        return found[0][0]

    # Driven by hand: an event loop's own sockets are not the SDK's.
    def run_coroutine(*args: object, **kwargs: object) -> Any:
        steps = trace(coroutine)(*args, **kwargs)
        try:
            while True:
                steps.send(None)
        except StopIteration as stop:
            return stop.value

    return {
        "plain": trace(plain),
        "rewarded": trace(reward=True)(plain),
        "badly rewarded": trace(reward=lambda result: 1 // 0)(plain),
        "coroutine": run_coroutine,
        "generator": run_generator,
        "explicit": explicit,
        "thread": in_a_thread,
        "named badly": trace(task=lambda *a, **k: 1 // 0, tags={"t": returned})(plain),
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(sorted(agents(None, None))),
    argument=st.sampled_from(sorted(VALUES)),
    returned=st.sampled_from(sorted(VALUES)),
    raised=st.none() | st.sampled_from(sorted(ERRORS)),
    mode=st.sampled_from(MODES),
    key=st.none() | st.just("the-admin's-own-key"),
)
def test_an_agent_does_what_it_would_do_without_us_and_its_events_arrive_once(
    kind: str,
    argument: str,
    returned: str,
    raised: str | None,
    mode: str | int,
    key: str | None,
) -> None:
    value, result = VALUES[argument](), VALUES[returned]()
    error = None if raised is None else ERRORS[raised]()
    with a_process(mode, key) as fake:
        agent = agents(result, error)[kind]
        with on_the_agents_time():
            if error is None:
                assert agent(value, keyword=value) is result
            else:
                with pytest.raises(BaseException) as caught:  # noqa: PT011 (any there is)
                    agent(value, keyword=value)
                assert caught.value is error, "the agent's own error, and no other"
        fake.mode = "ok"
        assert tracegrad.flush(30)
        arrived = once_each(fake)
        whole = {"rollout_started": 1, "rollout_finished": 1, "span": 1}
        assert {name: arrived[name] for name in whole} == whole
        if kind == "explicit":
            assert arrived["reward"] == 1
        unusable = error is None and kind == "rewarded" and returned != USABLE_REWARD
        assert tracegrad.stats().dropped == ({"invalid_reward": 1} if unusable else {})


@pytest.mark.parametrize("name", VALUES)
def test_every_hostile_value_as_argument_input_tag_and_result(name: str) -> None:
    value = VALUES[name]()
    with a_process("ok", None) as fake:
        for kind, agent in agents(value, None).items():
            assert agent(value, key=value) is value, kind
        with rollout(), contextlib.suppress(ValueError):
            reward(value)  # no finite number is one clear error, and whatever is, a reward
        assert tracegrad.flush(30)
        assert once_each(fake)["rollout_finished"] == len(agents(None, None)) + 1


async def test_an_event_loop_goes_on_while_the_proxy_hangs() -> None:
    """What the loop has to do between two turns of an agent is done, however long that hangs."""
    with a_process("hang", "the-admin's-own-key") as fake:

        @trace
        async def solve(i: int) -> int:
            await asyncio.sleep(0)
            reward(1.0)
            return i

        async def all_of_them() -> list[int]:
            return await asyncio.gather(*(solve(i) for i in range(50)))

        # The whole of it ends before the proxy has answered anything at all.
        assert await all_of_them() == list(range(50))
        assert fake.calls == []
        fake.mode = "ok"
        assert await asyncio.to_thread(tracegrad.flush, 30)
        assert once_each(fake)["reward"] == 50


AGENT = """
import asyncio, itertools, multiprocessing, os, sys, threading
import tracegrad

def say(worker):
    # Told to the test once the SDK has returned: from then on it may not be lost.
    for i in itertools.count():
        with tracegrad.rollout("t", input={"n": 10 ** 5000}) as r:
            r.reward(1.0, name=f"{worker}-{i}")
            os.write(1, f"{worker}-{i}\\n".encode())
        yield

def forever(worker):
    for _ in say(worker):
        pass

async def tasks():
    async def one(worker):
        for _ in say(worker):
            await asyncio.sleep(0)
    await asyncio.gather(one("task1"), one("task2"))

# A fork while another thread imports would leave a module's lock held in the child, for ever.
next(say("first"))
forever_in = lambda worker: threading.Thread(target=forever, args=(worker,), daemon=True).start()
forever_in("thread1")
forever_in("thread2")
if os.fork() == 0:
    forever("fork")
asyncio.run(tasks())
"""
WORKERS = {"thread1", "thread2", "fork", "task1", "task2"}


@pytest.mark.parametrize("mode", ["hang", 503])
@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL", "SIGINT"])
def test_events_before_a_signal_are_sent_by_the_next_process(
    mode: str | int, end: str, tmp_path: Path
) -> None:
    fake, server = serve()
    fake.mode = mode
    env = {**os.environ, "TRACEGRAD_URL": fake.url, "TRACEGRAD_JOURNAL": str(tmp_path / "journal")}
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert agent.stdout is not None
        said: list[str] = []
        while {line.partition("-")[0] for line in said} < WORKERS or len(said) < 100:
            said.append(agent.stdout.readline().strip())
            assert said[-1], "the agent ended by itself"
        os.killpg(agent.pid, signal.Signals[end])
        said += agent.stdout.read().split()
        agent.wait()
        fake.mode = "ok"
        # The forked child may be dying still: its journal is its own until it is gone.
        for _ in range(20):
            sent = subprocess.run(
                [sys.executable, "-m", "tracegrad.resend"],
                env=env,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert (sent.returncode, sent.stderr) == (0, "")
            if not [path for path in (tmp_path / "journal").rglob("*") if path.is_file()]:
                break
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
        server.shutdown()
        server.server_close()
    events = [e for c in fake.sent_to("/api/events") for e in json.loads(c.body)["events"]]
    ids: dict[str, set[str]] = {}
    for event in events:
        if event["type"] == "reward":
            ids.setdefault(event["name"], set()).add(event["reward_id"])
    assert set(said) <= set(ids), "lost"
    assert all(len(each) == 1 for each in ids.values()), "said once, and once in the store"
    assert not [path for path in (tmp_path / "journal").rglob("*") if path.is_file()]


def test_a_signal_handler_may_give_a_reward(tmp_path: Path) -> None:
    """It may have interrupted us anywhere, with any lock held."""
    with a_process("ok", None) as fake, rollout() as r:
        given_by_handler = 0

        def handler(*_: object) -> None:
            nonlocal given_by_handler
            given_by_handler += 1
            r.reward(1.0, name="handler")
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005)

        before = signal.signal(signal.SIGVTALRM, handler)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005)
        try:
            given_here = 0
            while given_by_handler < 100:
                r.reward(0.0, name="here")
                given_here += 1
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        assert tracegrad.flush(60)
        assert once_each(fake)["reward"] == given_here + given_by_handler


class Interrupted:
    """The agent's alarm goes off while something of this is asked for."""

    def __repr__(self) -> str:
        interrupt()
        return "asked for later"


def interrupt(*_: object, **__: object) -> None:
    if callable(signal.getsignal(signal.SIGUSR1)):
        signal.raise_signal(signal.SIGUSR1)


def in_an_argument(_: pytest.MonkeyPatch) -> None:
    trace(task="t")(lambda asked: asked)(Interrupted())


def in_a_task(_: pytest.MonkeyPatch) -> None:
    trace(task=interrupt)(lambda: None)()


def in_a_score(_: pytest.MonkeyPatch) -> None:
    trace(task="t", reward=interrupt)(lambda: 1.0)()  # type: ignore[arg-type]


def in_a_reward(patched: pytest.MonkeyPatch) -> None:
    with rollout(task="t") as r:
        patched.setattr(exporter, "encode", interrupt)
        r.reward(1.0)


def in_a_write(patched: pytest.MonkeyPatch) -> None:
    with rollout(task="t") as r:
        patched.setattr(os, "write", interrupt)
        r.reward(1.0)


def in_a_span(patched: pytest.MonkeyPatch) -> None:
    with rollout(task="t"):
        patched.setattr(telemetry, "encode_spans", interrupt)
        trace(lambda: None)()


def in_an_attribute(patched: pytest.MonkeyPatch) -> None:
    with rollout(task="t"):
        patched.setattr(telemetry, "KeyValue", interrupt)
        trace(lambda: None)()


def in_the_number_of_a_reward(_: pytest.MonkeyPatch) -> None:
    class OfADevice:
        def __float__(self) -> float:  # waits for it
            interrupt()
            return 1.0

    with rollout(task="t") as r:
        r.reward(OfADevice())


def in_the_length_of_an_argument(_: pytest.MonkeyPatch) -> None:
    class Lazy(list[int]):
        def __len__(self) -> int:
            interrupt()
            return 0

    trace(task="t")(lambda asked: asked)(Lazy())


def in_a_thread_that_starts(patched: pytest.MonkeyPatch) -> None:
    with rollout(task="t"):
        patched.setattr(context, "carried", interrupt)
        threading.Thread(target=lambda: None).start()


def in_a_job(patched: pytest.MonkeyPatch) -> None:
    with rollout(task="t"), ThreadPoolExecutor(1) as pool:
        patched.setattr(context, "carried", interrupt)
        pool.submit(lambda: None)


def at_the_beginning(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(thread_patching, "install", interrupt)
    trace(task="t")(lambda: None)()


def before_a_span(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(telemetry.SpanScope, "__init__", interrupt)
    trace(task="t")(lambda: None)()


def in_a_call(patched: pytest.MonkeyPatch) -> None:
    with rollout(task="t") as r:
        patched.setattr(context, "attribution_headers", interrupt)
        httpx.get(r.url)


@pytest.mark.parametrize(
    "interrupted",
    [
        in_an_argument,
        in_a_task,
        in_a_score,
        in_a_reward,
        in_a_write,
        in_a_span,
        in_an_attribute,
        in_the_number_of_a_reward,
        in_the_length_of_an_argument,
        in_a_thread_that_starts,
        in_a_job,
        at_the_beginning,
        before_a_span,
        in_a_call,
    ],
)
def test_a_time_out_of_the_agents_signal_handler_is_not_swallowed(
    interrupted: Callable[[pytest.MonkeyPatch], None], proxy: FakeProxy
) -> None:
    """It would wait for it in vain."""
    patched = pytest.MonkeyPatch()

    class Alarm(TimeoutError):
        pass

    def handler(*_: object) -> None:
        patched.undo()
        raise Alarm

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Alarm):
            interrupted(patched)
    finally:
        patched.undo()
        signal.signal(signal.SIGUSR1, before)
    assert context.current() is None
    with rollout(task="after") as r:
        r.reward(0.5)
    assert proxy.rewards()[-1] == (0.5, "reward", None)
    assert len(proxy.ends()) == len(proxy.events("rollout_started"))


# Its interpreter refuses to import what registers itself for the end.
LATE = """
import sys, threading
from tracegrad import rollout
def late():
    threading.main_thread().join()
    with rollout(task="late") as r:
        r.reward(1)
    print("done")
threading.Thread(target=late).start()
"""


def test_a_rollout_that_begins_while_the_process_ends_is_recorded(tmp_path: Path) -> None:
    fake, server = serve()
    env = {"TRACEGRAD_URL": fake.url, "TRACEGRAD_JOURNAL": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-c", LATE],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr
    assert "ResourceWarning" not in ran.stderr
    assert fake.ends() == [("completed", None)]
    server.shutdown()
    server.server_close()


def test_a_slow_exit_is_bounded_and_says_what_stays(tmp_path: Path) -> None:
    fake, server = serve()
    fake.mode = "hang"
    code = "import tracegrad\nwith tracegrad.rollout() as r: r.reward(1)\nprint('ran')"
    env = {**os.environ, "TRACEGRAD_URL": fake.url, "TRACEGRAD_JOURNAL": str(tmp_path / "journal")}
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        fake.mode = "ok"
        server.shutdown()
        server.server_close()
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "tracegrad events stay in" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", VALUES)
def test_no_value_costs_the_agent_long(name: str) -> None:
    """Of the agent's own thread, and the best of five: neighbours on the machine do not count. The
    promise is 10 ms; the bound leaves room for a machine that is five times slower."""

    @trace
    def solve(asked: object, **more: object) -> None:
        pass

    value = VALUES[name]()
    with a_process("hang", "the-admin's-own-key"):
        took = []
        for _ in range(5):
            began = time.thread_time()
            solve(value, more=value)
            took.append(time.thread_time() - began)
    assert min(took) < 0.05
