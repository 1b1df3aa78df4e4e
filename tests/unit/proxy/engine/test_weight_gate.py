"""Holds, marks and releases around a weight push, and the versions that tokens get."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, cast

import httpx
import orjson
import pytest

from support.engines.mock_engine import MODEL, Answer, MockEngine, logprobs_of, render
from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from support.proxy.raw_http import hang_up
from support.proxy.servers import CONTROL, CONTROL_KEY, EngineServer, eventually, serving
from tracegrad.proxy.dialects.openai_chat import ChatStreamWriter, OpenAIChatDialect
from tracegrad.proxy.endpoints.llm_call import _Relay
from tracegrad.proxy.engine.stream import EngineStream
from tracegrad.proxy.engine.upstreams.base import Consume, ConsumeFrames, Drained, UpstreamResponse
from tracegrad.proxy.engine.weight_gate import (
    SETTLE_LIMIT_S,
    SETTLE_TICKS,
    Admission,
    Canary,
    WeightUpdateGate,
)
from tracegrad.proxy.http import sse
from tracegrad.proxy.http.errors import Unavailable
from tracegrad.proxy.http.streaming_response import StreamedResponse
from tracegrad.store import PolicyVersion, Store

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def push(http: httpx.Client, what: str, **body: float | str) -> dict[str, Any]:
    answer = http.post(f"/api/push/{what}", json=body or None, headers=CONTROL)
    assert answer.status_code == 200, answer.text
    return answer.json()


def state(http: httpx.Client) -> dict[str, Any]:
    return http.get("/api/push").json()


def apart(http: httpx.Client) -> dict[str, Any]:
    """With what single servers have."""
    return http.get("/api/push/upstreams", headers=CONTROL).json()


def test_a_stream_across_two_marks_has_exact_spans(rig: ProxyWithEngine) -> None:
    rig.engine.replies.append(Answer("0123456789" * 3))  # 31 tokens with the end, by fours
    gates = [rig.engine.wait_before(3), rig.engine.wait_before(5)]
    stream = rig.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    for _ in range(1 + 3):
        next(stream)
    assert push(rig.http, "hold", ttl_s=60, drain_s=5) == {"in_flight": 1}
    push(rig.http, "version", version=7)
    gates[0].set()
    for _ in range(2):
        next(stream)
    push(rig.http, "version", version=8)
    gates[1].set()
    push(rig.http, "release")
    rest = list(stream)
    assert rest[-1].choices[0].finish_reason == "stop"
    [turn] = rig.turns()
    assert turn.policy_versions == ((0, 12), (7, 8), (8, 11))
    assert turn.untrainable is None
    assert state(rig.http) == {"version": 8, "held": False, "in_flight": 0, "waiting": 0}


def test_calls_share_what_is_cached_with_those_of_their_version(rig: ProxyWithEngine) -> None:
    def ask() -> dict[str, Any]:
        rig.client.chat.completions.create(model=MODEL, messages=HELLO)
        return rig.engine.requests[-1]

    assert "cache_salt" not in ask()
    push(rig.http, "hold", ttl_s=60)
    push(rig.http, "version", version=7)
    push(rig.http, "release")
    assert ask()["cache_salt"] == "7"


def test_a_whole_answer_across_a_mark_has_exact_spans_too(
    rig: ProxyWithEngine, pool: ThreadPoolExecutor
) -> None:
    """Where weights are pushed the engine streams to the proxy what the client gets whole."""
    push(rig.http, "hold", ttl_s=60)
    push(rig.http, "release")
    say = Answer("0123456789", [("look", '{"at": "it"}')], "Why not?")
    rig.engine.replies.append(say)
    gate = rig.engine.wait_before(3)
    answer = pool.submit(
        rig.client.chat.completions.create,
        model=MODEL,
        messages=HELLO,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    eventually(lambda: rig.engine.requests)
    assert rig.engine.requests[0]["stream"] is True
    assert push(rig.http, "hold", drain_s=5) == {"in_flight": 1}
    push(rig.http, "version", version=7)
    gate.set()
    push(rig.http, "release")

    [turn] = rig.turns() if answer.result() else []
    tokens = len(say.token_ids)
    assert turn.policy_versions == ((0, 12), (7, tokens - 12))
    assert turn.untrainable is None
    whole = answer.result()
    choice = whole.choices[0]
    assert (choice.message.content, choice.message.reasoning) == ("0123456789", "Why not?")
    assert choice.message.tool_calls[0].function.arguments == '{"at": "it"}'
    assert choice.finish_reason == "tool_calls"
    assert choice.token_ids == say.token_ids
    assert [entry.logprob for entry in choice.logprobs.content] == logprobs_of(say.token_ids)
    assert whole.prompt_token_ids == render(HELLO)
    assert whole.usage.completion_tokens == tokens
    assert whole.object == "chat.completion"


def test_a_whole_answer_across_the_first_mark_of_all_has_no_known_version(
    rig: ProxyWithEngine, pool: ThreadPoolExecutor
) -> None:
    go = rig.engine.wait_before(0)
    answer = pool.submit(rig.client.chat.completions.create, model=MODEL, messages=HELLO)
    eventually(lambda: rig.engine.requests)
    assert push(rig.http, "hold", ttl_s=60, drain_s=0.05) == {"in_flight": 1}
    push(rig.http, "version", version=1)
    push(rig.http, "release")
    go.set()
    assert answer.result().choices[0].finish_reason == "stop"
    rig.client.chat.completions.create(model=MODEL, messages=HELLO)
    across, after = rig.turns()
    assert across.untrainable == "version_unknown"
    assert across.policy_versions == ((0, len(Answer().token_ids)),)
    assert after.untrainable is None
    assert after.policy_versions == ((1, len(Answer().token_ids)),)


def test_a_hold_waits_for_whole_answers_and_only_so_long(
    rig: ProxyWithEngine, pool: ThreadPoolExecutor
) -> None:
    go = rig.engine.wait_before(0)
    answer = pool.submit(rig.client.chat.completions.create, model=MODEL, messages=HELLO)
    eventually(lambda: rig.engine.requests)
    held = pool.submit(push, rig.http, "hold", ttl_s=60, drain_s=20)
    with pytest.raises(TimeoutError):
        held.result(timeout=0.1)
    go.set()
    assert held.result(timeout=60) == {"in_flight": 0}
    answer.result()
    push(rig.http, "release")


@pytest.mark.parametrize("stream", [False, True])
def test_held_calls_wait_and_then_get_the_new_version(
    rig: ProxyWithEngine, pool: ThreadPoolExecutor, stream: bool
) -> None:
    def ask(text: str) -> str:
        messages = [{"role": "user", "content": text}]
        answer = rig.client.chat.completions.create(model=MODEL, messages=messages, stream=stream)
        if stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        return answer.choices[0].message.content

    push(rig.http, "hold", ttl_s=60, drain_s=1)
    answers: list[Future[str]] = []
    for number in range(4):
        answers.append(pool.submit(ask, f"call {number}"))
        eventually(lambda: state(rig.http)["waiting"] == len(answers))
    assert rig.engine.requests == []
    assert state(rig.http)["held"]
    push(rig.http, "version", version=3)
    push(rig.http, "release")
    assert [answer.result(60) for answer in answers] == ["ok"] * 4
    order = [request["messages"][0]["content"] for request in rig.engine.requests]
    assert sorted(order) == [f"call {number}" for number in range(4)]
    assert {turn.policy_versions for turn in rig.turns()} == {((3, 3),)}


def test_a_client_that_leaves_while_held_is_forgotten(rig: ProxyWithEngine) -> None:
    push(rig.http, "hold", ttl_s=60, drain_s=1)
    url = f"{rig.url}/v1/chat/completions"
    hang_up(url, {"messages": HELLO}, once=lambda: state(rig.http)["waiting"] == 1)
    eventually(lambda: state(rig.http)["waiting"] == 0)
    push(rig.http, "release")
    assert rig.engine.requests == []
    assert rig.store.rollouts() == []


def test_the_version_at_start_is_the_stores(store: Store, serve_proxy: ServeProxy) -> None:
    for version, label in ((4, "serving"), (5, "failed")):
        store.record_version(
            PolicyVersion(version=version, step=version, state=label, created_at=1.0, detail={})
        )
    with serve_proxy() as http:
        assert http.get("/api/push").json()["version"] == 4
        health = http.get("/healthz").json()
        assert (health["status"], health["version"]) == ("ok", 4)


@pytest.mark.parametrize(
    ("what", "body", "field"),
    [
        ("version", {"version": -1}, "version"),
        ("version", {}, "version"),
        ("version", {"version": "new"}, "version"),
        ("hold", {"ttl_s": 0}, "ttl_s"),
        ("hold", {"drain": 1}, "drain"),
    ],
)
def test_wrong_bodies_name_the_field(
    rig: ProxyWithEngine, what: str, body: dict[str, object], field: str
) -> None:
    answer = rig.http.post(f"/api/push/{what}", json=body, headers=CONTROL)
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == field


# The gate alone


async def test_a_hold_that_nobody_releases_opens_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = WeightUpdateGate()
    await gate.hold(ttl_s=0.02, drain_s=0)
    with caplog.at_level(logging.ERROR, "tracegrad.proxy"):
        async with asyncio.timeout(60), gate.admission(streaming=False):
            pass
    assert not gate.state()["held"]
    assert "0.02 s without a release; 1 waiting" in caplog.text


async def test_a_second_hold_renews_the_first() -> None:
    gate = WeightUpdateGate()
    await gate.hold(ttl_s=0.05, drain_s=0)
    await gate.hold(ttl_s=60, drain_s=0)
    await asyncio.sleep(0.1)
    assert gate.state()["held"]
    gate.release()
    assert gate._timer is None


async def test_release_lets_calls_in_in_their_order() -> None:
    gate = WeightUpdateGate()
    entered: list[int] = []

    async def call(number: int) -> None:
        async with gate.admission(streaming=True):
            entered.append(number)

    await gate.hold(ttl_s=60, drain_s=0)
    calls = []
    for number in range(20):
        calls.append(asyncio.create_task(call(number)))
        await asyncio.sleep(0)
    calls[7].cancel()
    await asyncio.sleep(0)
    gate.release()
    await asyncio.gather(*calls, return_exceptions=True)
    assert entered == [number for number in range(20) if number != 7]
    assert gate.state() == {"version": 0, "held": False, "in_flight": 0, "waiting": 0}


async def test_a_call_cancelled_as_it_is_let_in_leaves_nothing_behind() -> None:
    gate = WeightUpdateGate()

    async def call() -> None:
        async with gate.admission(streaming=False):
            pass

    await gate.hold(ttl_s=60, drain_s=0)
    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    gate.release()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.state()["in_flight"] == 0
    assert await gate.hold(ttl_s=60, drain_s=0) == 0


async def test_tokens_under_way_before_the_mark_keep_their_version() -> None:
    gate = WeightUpdateGate(version=1)
    async with gate.admission(streaming=True) as passage:
        marking = asyncio.create_task(gate.set_version(2))
        stamps = []
        for _ in range(5):  # still coming out of the socket, each within a tick of the last
            await asyncio.sleep(0.004)
            stamps.append(passage.arrival_version())
        await marking
        stamps.append(passage.arrival_version())
    assert stamps == [1, 1, 1, 1, 1, 2]


async def test_a_client_that_does_not_read_makes_its_version_unknown() -> None:
    gate = WeightUpdateGate()
    async with gate.admission(streaming=True) as slow, gate.admission(streaming=True) as quick:
        slow.blocked = True
        await gate.set_version(1)
    assert slow.version_unknown
    assert not quick.version_unknown


async def test_calls_after_a_mark_are_certain() -> None:
    gate = WeightUpdateGate()
    await gate.set_version(1)
    async with gate.admission(streaming=False) as passage:
        assert passage.version == 1
    assert not passage.version_unknown


async def test_a_call_that_waits_too_long_is_told_what_for_and_which_limit() -> None:
    """However often the hold is renewed meanwhile: a step on shared GPUs may take long."""
    gate = WeightUpdateGate(max_wait_s=0.05)
    await gate.hold(ttl_s=60, drain_s=0)

    async def call() -> None:
        async with gate.admission(streaming=True):
            pass

    waiting = asyncio.create_task(call())
    while not waiting.done():
        await gate.hold(ttl_s=60, drain_s=0)
        await asyncio.sleep(0.01)
    said = r"while new weights are trained or pushed, and .* 0\.05 s \(proxy\.max_wait_s\)"
    with pytest.raises(Unavailable, match=said):
        await waiting
    assert gate.state() == {"version": 0, "held": True, "in_flight": 0, "waiting": 0}


async def test_a_gate_that_begins_held_opens_with_the_first_release() -> None:
    gate = WeightUpdateGate(version=3, held=True)

    async def call() -> int:
        async with gate.admission(streaming=False) as passage:
            return passage.version

    early = asyncio.create_task(call())
    await asyncio.sleep(0.02)
    assert gate.state() == {"version": 3, "held": True, "in_flight": 0, "waiting": 1}
    await gate.hold(ttl_s=60, drain_s=0)
    await gate.set_version(4)
    gate.release()
    assert await early == 4, "the weights that it meets are the pushed ones"


async def test_a_gate_without_a_version_is_opened_by_nothing_before_it_has_one() -> None:
    gate = WeightUpdateGate(version=3, held=True, lacks_version=True)

    async def call() -> int:
        async with gate.admission(streaming=False) as passage:
            return passage.version

    early = asyncio.create_task(call())
    await gate.hold(ttl_s=0.01, drain_s=0)
    await asyncio.sleep(0.1)
    gate.release()
    await gate.set_version(5, upstream="http://one")
    gate.release("http://one")
    await asyncio.sleep(0.02)
    assert not early.done()
    assert gate.held
    await gate.set_version(5)
    assert gate.held
    gate.release()
    assert await early == 5


def test_the_proxy_begins_held_where_its_settings_say_so(serve_proxy: ServeProxy) -> None:
    with serve_proxy(held=True, control_key=CONTROL_KEY) as http:
        assert state(http)["held"]
        push(http, "release")
        assert state(http)["held"], "another push's release, which has told it no version"
        push(http, "version", version=4)
        push(http, "release")
        assert not state(http)["held"]


async def test_a_client_that_blocks_twice_at_the_start_is_seen_both_times() -> None:
    """What waits unread behind the first words gets no version of a mark that it precedes."""
    gate = WeightUpdateGate()
    call = OpenAIChatDialect().parse(b'{"messages":[{"role":"user","content":"go"}]}', {}, {})
    async with gate.admission(streaming=True) as admission:
        blocked: list[bool] = []

        class Client:
            def write(self, data: bytes) -> bool:
                return True

            async def drain(self) -> None:
                blocked.append(admission.blocked)

        class Engine:
            async def deliver(
                self, consume: Consume, drained: Drained, frames: ConsumeFrames
            ) -> None:
                delta = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
                said = sse.encode_event(orjson.dumps(delta)) * 4
                assert consume(said + sse.DONE_EVENT)
                await drained()

        stream = EngineStream(replace(call, stream=True), admission.arrival_version)
        relay = _Relay(stream, ChatStreamWriter(), cast(StreamedResponse, Client()))
        assert await relay.run(cast(UpstreamResponse, Engine()), admission) is None
        assert len(blocked) == 3
        assert all(blocked)
        assert not admission.blocked


class SentCall:
    """A call that was sent to a server, and is open."""

    def __init__(self, gate: WeightUpdateGate, upstream: str, *, streaming: bool = True) -> None:
        self.admission = gate.admission(streaming=streaming)
        self.upstream = upstream

    async def __aenter__(self) -> Admission:
        await self.admission.__aenter__()
        self.admission.sent_to(self.upstream)
        return self.admission

    async def __aexit__(self, *error: Any) -> None:
        await self.admission.__aexit__(*error)


async def test_a_call_has_the_version_of_the_server_that_it_was_sent_to() -> None:
    gate = WeightUpdateGate(4)
    async with SentCall(gate, "a") as first, SentCall(gate, "b") as second:
        await gate.hold(ttl_s=60, drain_s=0, upstream="a")
        assert (gate.holds("a"), gate.holds("b"), gate.held) == (True, False, False)
        await gate.set_version(5, upstream="a")
        gate.release("a")
        assert (first.arrival_version(), second.arrival_version()) == (5, 4)
        async with SentCall(gate, "a") as third, SentCall(gate, "b") as fourth:
            assert (third.version, fourth.version) == (5, 4)
            fourth.sent_to("a")  # the other one did not answer
            assert fourth.version == 5
        await gate.hold(ttl_s=60, drain_s=0, upstream="b")
        await gate.set_version(5, upstream="b")
        gate.release("b")
        await gate.set_version(5)
        assert not first.version_unknown
        assert not second.version_unknown
        assert (first.arrival_version(), second.arrival_version()) == (5, 5)
    assert "upstreams" not in gate.state()


async def test_what_cannot_be_split_is_of_no_version_on_the_server_that_changed_alone() -> None:
    gate = WeightUpdateGate(4)
    whole = [SentCall(gate, url, streaming=False) for url in ("a", "b")]
    async with whole[0] as here, whole[1] as there:
        assert await gate.hold(ttl_s=60, drain_s=0, upstream="a") == 1
        await gate.set_version(5, upstream="a")
        gate.release("a")
        assert (here.version_unknown, there.version_unknown) == (True, False)
        async with SentCall(gate, "a", streaming=False) as later:
            await gate.set_version(5, upstream="b")
            await gate.set_version(5)
            assert not later.version_unknown, "all of it was sampled by 5"
            assert there.version_unknown
            there.sent_to("a")  # the other one did not answer: what changed there was of nothing
            assert (there.version, there.version_unknown) == (5, False)


async def test_a_push_to_one_server_does_not_wait_for_tokens_of_another() -> None:
    gate = WeightUpdateGate(4)
    async with SentCall(gate, "a"), SentCall(gate, "b") as busy:
        marking = asyncio.create_task(gate.set_version(5, upstream="a"))
        arrived = 0
        while not marking.done():
            busy.arrival_version()
            arrived += 1
            await asyncio.sleep(0)
        assert arrived > SETTLE_TICKS
        began = time.monotonic()
        await gate.set_version(6, upstream="a")
        assert time.monotonic() - began < SETTLE_LIMIT_S


async def test_a_server_is_drained_of_its_own_whole_calls_and_given_calls_again_in_time() -> None:
    gate = WeightUpdateGate(4)
    again = asyncio.Event()
    gate.on_release = again.set
    async with SentCall(gate, "b", streaming=False), AsyncExitStack() as stack:
        await stack.enter_async_context(SentCall(gate, "a", streaming=False))
        holding = asyncio.create_task(gate.hold(ttl_s=60, drain_s=60, upstream="a"))
        await asyncio.sleep(0)
        assert not holding.done()
        await stack.aclose()
        assert await holding == 0, "that of the other server goes on"
    await gate.hold(ttl_s=0.01, drain_s=0, upstream="a")
    await again.wait()
    assert not gate.holds("a"), "nobody released it"
    await gate.hold(ttl_s=60, drain_s=0, upstream="a")
    gate.release()
    assert not gate.holds("a"), "a release of all is one of each"


def test_the_control_api_takes_one_server_and_a_canary(rig: ProxyWithEngine) -> None:
    url = rig.engine_url
    push(rig.http, "hold", ttl_s=60, upstream=url)
    push(rig.http, "version", version=7, upstream=url)
    assert apart(rig.http)["upstreams"] == {url: {"version": 7, "held": True}}
    assert "upstreams" not in state(rig.http), "agents need not know where engines are"
    push(rig.http, "release", upstream=url)
    push(rig.http, "canary", upstream=url, share=0.25)
    assert apart(rig.http)["canary"] == {"upstream": url, "share": 0.25}
    rig.client.chat.completions.create(model=MODEL, messages=HELLO)
    [turn] = rig.turns()
    assert {version for version, _ in turn.policy_versions} == {7}
    push(rig.http, "canary", share=0)
    push(rig.http, "version", version=7)
    assert apart(rig.http) == {"version": 7, "held": False, "in_flight": 0, "waiting": 0}
    body = {"version": 8, "upstream": "http://elsewhere"}
    answer = rig.http.post("/api/push/version", json=body, headers=CONTROL)
    assert answer.status_code == 400
    assert "http://elsewhere is none of this proxy's servers" in answer.text


def test_a_candidate_by_name_is_asked_for_by_its_share_and_has_a_version_of_its_own(
    rig: ProxyWithEngine, serve_proxy: ServeProxy
) -> None:
    """One engine, and one proxy that names the model itself."""
    name = "policy-candidate"
    with serve_proxy(upstream=rig.engine_url, model="policy", control_key=CONTROL_KEY) as http:
        push(http, "version", version=3)
        push(http, "canary", model=name, share=0.5)
        push(http, "version", version=4, model=name)
        state = {"version": 3, "held": False, "in_flight": 0, "waiting": 0}
        assert apart(http) == state | {"canary": {"model": name, "share": 0.5, "version": 4}}
        rollouts = [f"n{n}" for n in range(12)]
        tried = [each for each in rollouts if Canary(None, 0.5, name).has(each)]
        assert 0 < len(tried) < len(rollouts)

        def call() -> tuple[dict[str, str], dict[str, int]]:
            """Which model each rollout's call asked the engine for, and the version of its turn."""
            asked, versions = {}, {}
            for each in rollouts:
                body = {"model": "any", "messages": HELLO}
                answer = http.post(f"/rollouts/{each}/v1/chat/completions", json=body)
                assert answer.status_code == 200
                asked[each] = rig.engine.requests[-1]["model"]
                [(versions[each], _)] = rig.turns(each)[-1].policy_versions
            return asked, versions

        asked, versions = call()
        assert asked == {each: name if each in tried else "policy" for each in rollouts}
        assert versions == {each: 4 if each in tried else 3 for each in rollouts}
        push(http, "canary", share=0)
        assert apart(http) == state
        asked, versions = call()
        assert (set(asked.values()), set(versions.values())) == ({"policy"}, {3})
        body = {"model": name, "upstream": rig.engine_url, "share": 0.5}
        answer = http.post("/api/push/canary", json=body, headers=CONTROL)
        assert answer.status_code == 422
        assert "on one server, or has a name on all" in answer.text


async def test_a_call_that_has_a_candidates_name_follows_what_the_name_is_given() -> None:
    gate = WeightUpdateGate(3)
    gate.set_canary(Canary(None, 1.0, "candidate"))
    await gate.set_version(4, model="candidate")
    async with gate.admission("r", streaming=True) as call, gate.admission(streaming=True) as other:
        for each in (call, other):
            each.sent_to("http://engine")
        assert (call.model, call.arrival_version(), other.arrival_version()) == ("candidate", 4, 3)
        await gate.set_version(5, model="candidate")
        assert (call.arrival_version(), other.arrival_version()) == (5, 3)
        await gate.set_version(3, model="candidate")
        gate.set_canary(None)
        assert (call.arrival_version(), other.arrival_version()) == (3, 3)
        await gate.set_version(6)  # of all, whatever name they have
        assert (call.arrival_version(), other.arrival_version()) == (6, 6)
    assert not call.version_unknown
    assert not other.version_unknown


def test_each_rollout_has_one_side_of_a_canary_and_its_engines_version(
    rig: ProxyWithEngine, serve_proxy: ServeProxy
) -> None:
    other = EngineServer()
    other.engine = MockEngine()
    with (
        serving(other, lifespan="off") as url,
        serve_proxy(upstream=f"{rig.engine_url},{url}", control_key=CONTROL_KEY) as http,
    ):
        push(http, "canary", upstream=url, share=0.5)
        push(http, "hold", ttl_s=60, upstream=url)
        push(http, "version", version=7, upstream=url)
        push(http, "release", upstream=url)
        for n in range(16):
            for _ in range(2):
                body = {"model": MODEL, "messages": HELLO}
                answer = http.post(f"/rollouts/c{n}/v1/chat/completions", json=body)
                assert answer.status_code == 200
        tried = [f"c{n}" for n in range(16) if Canary(url, 0.5).has(f"c{n}")]
        assert 0 < len(tried) < 16
        for n in range(16):
            versions = {v for turn in rig.turns(f"c{n}") for v, _ in turn.policy_versions}
            assert versions == {7 if f"c{n}" in tried else 0}
        assert len(other.engine.requests) == 2 * len(tried)
        push(http, "hold", ttl_s=60, upstream=url)
        late = http.post(f"/rollouts/{tried[0]}/v1/chat/completions", json=body)
        assert late.status_code == 200, "the others take the calls of an engine that stands still"
        assert rig.turns(tried[0])[-1].policy_versions[0][0] == 0
