"""A client library that asks again does not make a second turn."""

from __future__ import annotations

import json
import random
import tracemalloc
import uuid
from collections.abc import Callable

import httpx
import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engines.mock_engine import MODEL, Answer
from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.servers import eventually
from tracegrad.proxy.capture.retry_cache import RetryCache, fingerprint

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/rollouts/r1/v1/chat/completions"
AGAIN = {"x-stainless-retry-count": "1"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_repeat_of_an_answered_call_gets_the_recorded_answer(
    rig: ProxyWithEngine, path: str, stream: bool
) -> None:
    rig.engine.replies += [Answer("the first answer"), Answer("another one")]
    body = {"messages": HELLO, "prompt": "Hello", "stream": stream}
    url = f"/rollouts/r1/v1/{path}"
    first = rig.http.post(url, json=body)
    second = rig.http.post(url, json=body, headers=AGAIN)
    assert first.status_code == second.status_code == 200
    assert "first answer" in second.text or stream
    assert "another" not in second.text
    assert len(rig.engine.requests) == 1
    assert len(rig.turns()) == 1


def test_a_repeated_stream_says_the_same_with_its_tools(rig: ProxyWithEngine) -> None:
    rig.engine.replies.append(Answer("Look:", [("look", '{"a": 1}'), ("look", '{"a": 2}')], "Hm."))
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    asked = {"model": MODEL, "messages": HELLO, "tools": tools}
    with rig.client.chat.completions.stream(**asked) as events:
        first = events.get_final_completion()
    with rig.client.chat.completions.stream(**asked, extra_headers=AGAIN) as events:
        second = events.get_final_completion()
    assert second.choices[0].message == first.choices[0].message
    assert second.choices[0].finish_reason == "tool_calls"
    assert second.id == first.id
    assert len(rig.turns()) == 1


def test_another_body_or_rollout_is_no_repeat(rig: ProxyWithEngine) -> None:
    rig.http.post(CHAT, json={"messages": HELLO})
    rig.http.post(CHAT, json={"messages": HELLO, "seed": 1}, headers=AGAIN)
    rig.http.post("/rollouts/r2/v1/chat/completions", json={"messages": HELLO}, headers=AGAIN)
    assert len(rig.engine.requests) == 3
    assert (len(rig.turns("r1")), len(rig.turns("r2"))) == (2, 1)


def test_another_rollout_by_its_header_or_another_path_is_no_repeat(rig: ProxyWithEngine) -> None:
    body = {"messages": HELLO, "prompt": "Hello"}
    for rollout_id, path in (("r1", "chat/completions"), ("r2", "chat/completions")):
        named = {"x-tracegrad-rollout": rollout_id, **AGAIN}
        rig.http.post(f"/v1/{path}", json=body, headers=named).raise_for_status()
    named = {"x-tracegrad-rollout": "r1", **AGAIN}
    rig.http.post("/v1/completions", json=body, headers=named).raise_for_status()
    assert len(rig.engine.requests) == 3
    assert (len(rig.turns("r1")), len(rig.turns("r2"))) == (2, 1)


@pytest.mark.parametrize("usage", [False, True])
def test_a_repeated_stream_ends_as_the_first_one_did(rig: ProxyWithEngine, usage: bool) -> None:
    asked = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": usage}}

    def end_of(headers: dict[str, str]) -> list[object]:
        """Of the choice, and the counts where they were asked for."""
        text = rig.http.post(CHAT, json=asked, headers=headers).text
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        ends = [c for chunk in chunks for c in chunk["choices"] if c.get("finish_reason")]
        counts = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        return [[(end["finish_reason"], end["stop_reason"]) for end in ends], counts]

    first = end_of({})
    assert end_of(AGAIN) == first
    assert bool(first[1]) == usage
    assert len(rig.turns()) == 1


def test_parallel_samples_of_one_prompt_are_turns_of_their_own(rig: ProxyWithEngine) -> None:
    for _ in range(3):
        rig.http.post(CHAT, json={"messages": HELLO})
    assert len(rig.turns()) == 3


def test_a_repeat_of_one_of_several_equal_calls_is_sampled(rig: ProxyWithEngine) -> None:
    """Nobody can tell which of them it repeats: no agent gets another's sample."""
    rig.engine.replies += [Answer("one"), Answer("two"), Answer("three")]
    for _ in range(2):
        rig.http.post(CHAT, json={"messages": HELLO})
    again = rig.http.post(CHAT, json={"messages": HELLO}, headers=AGAIN)
    assert "three" in again.text
    assert len(rig.turns()) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeat_of_a_refused_call_does_not_get_anothers_answer(
    rig: ProxyWithEngine, stream: bool
) -> None:
    rig.engine.replies += [Answer("another agent's"), Answer("its own")]
    body = {"messages": HELLO, "stream": stream}
    rig.http.post(CHAT, json=body)
    rig.engine.failure = (500, {"error": {"message": "oh", "type": "x", "code": 500}}, {})
    assert rig.http.post(CHAT, json=body).status_code == 500
    rig.engine.failure = None
    rig.http.post(CHAT, json=body, headers=AGAIN)
    assert len(rig.engine.requests) == 3
    assert len(rig.turns()) == 2


def test_a_repeat_of_an_aborted_call_is_sampled_and_alone_trainable(rig: ProxyWithEngine) -> None:
    rig.engine.replies.append(Answer("a long story that nobody waits for"))
    body = {"messages": HELLO, "stream": True}
    never = rig.engine.wait_before(1)
    with rig.http.stream("POST", CHAT, json=body) as response:
        next(response.iter_raw())
    eventually(lambda: rig.turns())
    never.set()
    assert rig.http.post(CHAT, json=body, headers=AGAIN).status_code == 200
    assert [turn.untrainable for turn in rig.turns()] == ["aborted", None]


def test_the_library_itself_repeats(rig: ProxyWithEngine) -> None:
    """OpenAI's client, its connection broken after the answer was recorded, asks again."""
    rig.engine.replies += [Answer("recorded"), Answer("never asked for")]
    tries: list[str] = []

    def breaks_once(request: httpx2.Request) -> httpx2.Response:
        tries.append(request.headers["x-stainless-retry-count"])
        kept = ("authorization", "content-type", "x-stainless-retry-count")
        headers = {name: request.headers[name] for name in kept}
        answer = httpx.post(str(request.url), headers=headers, content=request.content)
        if len(tries) == 1:
            raise httpx2.ReadError("the connection broke", request=request)
        return httpx2.Response(answer.status_code, json=answer.json())

    transport = httpx2.Client(transport=httpx2.MockTransport(breaks_once))
    with openai.OpenAI(base_url=f"{rig.url}/v1", api_key="tg-r1", http_client=transport) as client:
        answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert tries == ["0", "1"]
    assert answer.choices[0].message.content == "recorded"
    assert len(rig.turns()) == 1


def test_of_equal_calls_no_more_than_two_answers_are_kept() -> None:
    repeats = RetryCache()
    call = fingerprint("r", "/", b"{}")
    for number in range(1000):
        repeats.record_answer(call, [f"turn {number}"] * 100)
    assert repeats.lookup(call) == ()
    [kept] = repeats._given.values()
    assert len(kept.answers) == 2
    assert repeats.size < 20_000


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from([0, 1, 100]), st.booleans())))
def test_what_is_kept_of_calls_is_bounded_in_bytes(deeds: list[tuple[int, int, bool]]) -> None:
    repeats = RetryCache(most_bytes=12_000)
    for call, choices, fails in deeds:
        known = fingerprint("r", "/", str(call).encode())
        if fails:
            repeats.record_failure(known)
        else:
            repeats.record_answer(known, ["t"] * choices)
        kept = repeats._given.values()
        assert repeats.size == sum(min(given.size, 12_000) for given in kept) <= 12_000


@pytest.mark.parametrize("failed", [False, True])
def test_a_call_takes_the_memory_that_is_counted(failed: bool) -> None:
    calls = 2000
    repeats = RetryCache()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(calls):
        known = fingerprint(f"rollout {number}", CHAT, b"%d" % number)
        if failed:
            repeats.record_failure(known)
        else:
            repeats.record_answer(known, [str(uuid.uuid4())])
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken / calls < 1.25 * repeats.size / calls


def test_a_call_that_was_answered_once_is_remembered_behind_many_others() -> None:
    repeats = RetryCache()
    for number in range(10_000):
        repeats.record_answer(fingerprint("r", "/", str(number).encode()), [str(number)])
    assert repeats.lookup(fingerprint("r", "/", b"0")) == ("0",)


class _Ring:
    """What one worker told; others read it whenever."""

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[..., object]] = {}
        self.said: list[tuple[str, tuple[object, ...]]] = []

    def subscribe(self, kind: str, handler: Callable[..., object]) -> None:
        self.handlers[kind] = handler

    def when_lost(self, forget: Callable[[], None]) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def publish(self, kind: str, *args: object) -> None:
        self.said.append((kind, args))


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=10), st.randoms())
def test_workers_agree_on_failures_in_whatever_order_they_hear_of_them(
    happened: list[tuple[int, bool]], order: random.Random
) -> None:
    """A failure of one worker, and a repeat that another one samples, may be read the other way
    round by a third."""
    call = fingerprint("r1", "/v1", b"x")
    rings = [_Ring() for _ in range(3)]
    workers = [RetryCache(ring) for ring in rings]  # type: ignore[arg-type]
    read = {(reader, writer): 0 for reader in range(3) for writer in range(3) if reader != writer}

    def catch_up(reader: int, writer: int) -> None:
        for kind, args in rings[writer].said[read[reader, writer] :]:
            rings[reader].handlers[kind](*args)
        read[reader, writer] = len(rings[writer].said)

    open_failures = 0
    for worker, fails in happened:
        if fails:
            workers[worker].record_failure(call)
            open_failures += 1
            continue
        others = [other for other in range(3) if other != worker]
        order.shuffle(others)
        for other in others:  # a worker catches up before it decides
            catch_up(worker, other)
        assert workers[worker].lookup(call) == ()
        open_failures = max(open_failures - 1, 0)
    pairs = list(read)
    order.shuffle(pairs)
    for reader, writer in pairs:
        catch_up(reader, writer)
    known = [worker._given.get(call) for worker in workers]
    left = {0 if one is None else len(one.open_failures) for one in known}
    assert left == {open_failures}


def test_a_failure_that_two_workers_repeat_at_once_hides_no_later_one() -> None:
    """They would hand an agent the answer of another one's call."""
    call = fingerprint("r1", "/v1", b"x")
    rings = [_Ring() for _ in range(2)]
    one, two = [RetryCache(ring) for ring in rings]  # type: ignore[arg-type]
    one.record_failure(call)
    for kind, args in rings[0].said:
        rings[1].handlers[kind](*args)
    assert one.lookup(call) == two.lookup(call) == ()
    one.record_answer(call, ["answered"])
    two.record_failure(call)
    for mine, theirs in (rings, rings[::-1]):
        for kind, args in theirs.said:
            mine.handlers[kind](*args)
    assert two.lookup(call) == (), "its own is sampled again"
