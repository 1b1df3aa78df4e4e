"""Where a call's seconds went, as the turn says it: marks, and what the proxy makes of them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from support.engines.mock_engine import Answer
from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.raw_http import hang_up
from support.proxy.servers import CONTROL, eventually
from tracegrad.events import CALL_STAGES, Json
from tracegrad.proxy.capture import call_timing
from tracegrad.proxy.capture.call_timing import CallTiming, timing_json

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/rollouts/r1/v1/chat/completions"
WHOLE = {"prepare", "gate", "encode", "queue", "inference", "finish"}
STREAMED = WHOLE - {"inference"} | {"prefill", "decode"}


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A clock that goes on by 1, 2, 4, ... seconds: every stage has another length."""
    times = (2.0**number for number in count())
    with monkeypatch.context() as patched:
        patched.setattr(call_timing, "monotonic", lambda: next(times))
        yield


MARKS = ("entered_gate", "admitted", "asked", "sent", "answered", "ended")


def marked(*marks: str, streaming: bool = True) -> dict[str, float]:
    timing = CallTiming(0.0)
    timing.streaming = streaming
    for mark in marks:
        getattr(timing, mark)()
    return timing.stages(100.0)


@pytest.mark.usefixtures("ticking")
def test_a_stage_lasts_from_its_mark_to_the_next() -> None:
    assert marked(*MARKS) == {
        "prepare": 1.0,
        "gate": 1.0,
        "encode": 2.0,
        "queue": 4.0,
        "prefill": 8.0,
        "decode": 16.0,
        "finish": 68.0,
    }


@pytest.mark.usefixtures("ticking")
def test_an_answer_in_one_piece_has_one_stage() -> None:
    assert marked(*MARKS, streaming=False) == {
        "prepare": 1.0,
        "gate": 1.0,
        "encode": 2.0,
        "queue": 4.0,
        "inference": 8.0,
        "finish": 84.0,
    }


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize(("streaming", "before"), [(True, "prefill"), (False, "inference")])
@pytest.mark.parametrize(("said", "queued"), [(0.0, 0.0), (6.0, 6.0), (60.0, 8.0)])
def test_the_engines_own_queue_is_cut_out_of_what_came_before_its_first_word(
    streaming: bool, before: str, said: float, queued: float
) -> None:
    timing = CallTiming(0.0)
    timing.streaming = streaming
    for mark in MARKS:
        getattr(timing, mark)()
    timing.engine_queued_s = said
    found = timing.stages(100.0)
    assert (found["engine_queue"], found[before]) == (queued, 8.0 - queued)
    assert math.fsum(found.values()) == 100.0
    assert list(found) == [stage for stage in CALL_STAGES if stage in found]


@pytest.mark.usefixtures("ticking")
def test_an_engine_that_died_in_its_answer_was_waited_for() -> None:
    timing = CallTiming(0.0)
    for mark in (*MARKS, "begin_again", *MARKS):
        getattr(timing, mark)()
    found = timing.stages(300.0)
    assert (found["gate"], found["encode"], found["queue"]) == (1.0, 2.0, 64.0 - 4.0)
    assert (found["prefill"], found["decode"], found["finish"]) == (64.0, 128.0, 44.0)
    assert math.fsum(found.values()) == 300.0


@pytest.mark.usefixtures("ticking")
def test_a_stream_that_goes_on_keeps_what_its_first_engine_did() -> None:
    timing = CallTiming(0.0)
    for mark in (*MARKS, "goes_on", *MARKS):
        getattr(timing, mark)()
    found = timing.stages(200.0)
    assert timing.first_token_s == 16.0, "its client has it"
    assert found == {
        "prepare": 1.0,
        "gate": 1.0,
        "encode": 2.0,
        "queue": 4.0 + 32.0,  # from the first engine's end to the second one's first words
        "prefill": 8.0,
        "decode": 16.0 + 64.0,
        "finish": 200.0 - 128.0,
    }


@pytest.mark.usefixtures("ticking")
def test_what_the_second_engine_of_a_stream_says_is_not_of_the_first_ones_prefill() -> None:
    timing = CallTiming(0.0)
    for mark in (*MARKS, "goes_on", *MARKS):
        getattr(timing, mark)()
    timing.engine_queued_s = 6.0
    found = timing.stages(200.0)
    assert "engine_queue" not in found
    assert found["prefill"] == 8.0


@pytest.mark.usefixtures("ticking")
def test_a_stream_that_nobody_goes_on_with_waited_until_that_was_known() -> None:
    timing = CallTiming(0.0)
    for mark in (*MARKS, "goes_on", "sent", "ended"):
        getattr(timing, mark)()
    found = timing.stages(100.0)
    assert (found["queue"], found["decode"], found["finish"]) == (4.0 + 32.0, 16.0, 36.0)


@pytest.mark.usefixtures("ticking")
def test_the_attempt_that_was_answered_ends_the_queue() -> None:
    found = marked("entered_gate", "admitted", "asked", "sent", "sent", "sent", "answered", "ended")
    assert found["queue"] == 32.0 - 4.0
    assert found["prefill"] == 32.0


@pytest.mark.parametrize("reached", range(len(MARKS)))
@pytest.mark.usefixtures("ticking")
def test_a_call_that_ends_early_ends_in_its_stage(reached: int) -> None:
    found = marked(*MARKS[:reached], "ended", "ended")
    assert list(found) == [*list(STREAMED_IN_ORDER)[: reached + 1], "finish"]
    assert sum(found.values()) == 100.0


STREAMED_IN_ORDER = [stage for stage in CALL_STAGES if stage in STREAMED - {"finish"}]


def test_what_is_stored_is_rounded_and_says_pushes_only_where_there_were_some() -> None:
    assert timing_json({"gate": 1 / 3}, 0.0) == {"gate": 0.333333}
    assert timing_json({"gate": 1 / 3}, 0.5) == {"gate": 0.333333, "held": 0.5}


def call(rig: ProxyWithEngine, *, stream: bool, **more: int) -> None:
    body = {"messages": HELLO, "stream": stream, **more}
    rig.http.post(CHAT, json=body).raise_for_status()


def timing_of(rig: ProxyWithEngine, index: int = -1) -> Json:
    found = rig.turns()[index].timing
    assert found is not None
    return found


def seconds(timing: Json) -> float:
    return math.fsum(timing[stage] for stage in CALL_STAGES if stage in timing)


@pytest.mark.parametrize(("stream", "stages"), [(True, STREAMED), (False, WHOLE)])
def test_a_call_says_where_its_seconds_went(
    rig: ProxyWithEngine, stream: bool, stages: set[str]
) -> None:
    began = time.monotonic()
    call(rig, stream=stream)
    took = time.monotonic() - began
    timing = timing_of(rig)
    assert set(timing) == stages
    assert all(value >= 0 for value in timing.values())
    assert 0 < seconds(timing) <= took


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_a_call_says_what_its_engine_says_of_its_queue(
    rig: ProxyWithEngine, path: str, stream: bool
) -> None:
    rig.engine.queue_ms = 1e-3
    before = "prefill" if stream else "inference"
    asks = {"messages": HELLO, "max_tokens": 50} if path != "responses" else {"input": "Hello"}
    body = {"model": "mock", "stream": stream, **asks}
    answer = rig.http.post(f"/rollouts/r1/v1/{path}", json=body).raise_for_status()
    timing = timing_of(rig)
    assert set(timing) == (STREAMED if stream else WHOLE) | {"engine_queue"}
    assert (timing["engine_queue"], timing[before] > 0) == (1e-6, True)
    if stream and path == "chat/completions":
        assert "usage" not in answer.text, "its client did not ask for it"
    call(rig, stream=stream, n=2)
    assert "engine_queue" not in timing_of(rig), "vLLM does not say it of several choices"


def test_the_next_turn_says_how_long_the_commit_took(rig: ProxyWithEngine) -> None:
    rig.writer.hold()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(call, rig, stream=False)
        eventually(lambda: rig.writer.waiting)
        held_at = time.monotonic()
        held_s = eventually(lambda: time.monotonic() - held_at)
        rig.writer.release()
        first.result()
    call(rig, stream=False)
    call(rig, stream=False)
    turns = rig.turns()
    assert turns[0].timing is not None
    assert "commits" not in turns[0].timing
    commits = [turn.timing["commits"] for turn in turns[1:] if turn.timing]
    assert [list(each) for each in commits] == [[turn.turn_id] for turn in turns[:2]]
    assert commits[0][turns[0].turn_id] >= held_s


def test_choices_of_one_call_share_its_time(rig: ProxyWithEngine) -> None:
    rig.engine.replies += [Answer("a"), Answer("b")]
    call(rig, stream=False, n=2)
    first, second = rig.turns()
    assert first.timing == second.timing
    call(rig, stream=False)
    assert set(timing_of(rig)["commits"]) == {first.turn_id, second.turn_id}


def test_a_wait_at_the_gate_is_the_gates(rig: ProxyWithEngine) -> None:
    rig.http.post("/api/push/hold", json={}, headers=CONTROL).raise_for_status()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(call, rig, stream=False)
        eventually(lambda: rig.http.get("/api/push").json()["waiting"] == 1)
        began = time.monotonic()
        rig.http.get("/healthz")
        waited = time.monotonic() - began
        rig.http.post("/api/push/release", json={}, headers=CONTROL).raise_for_status()
        waiting.result()
    timing = timing_of(rig)
    assert timing["gate"] >= waited
    # Where weights are pushed the engine streams to the proxy: prefill and decode are known.
    assert set(timing) == STREAMED


def test_a_push_in_the_middle_of_an_answer_is_said_beside(rig: ProxyWithEngine) -> None:
    rig.engine.replies.append(Answer("a story that takes a while"))
    more = rig.engine.wait_before(2)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(call, rig, stream=True)
        eventually(lambda: rig.engine.requests)
        rig.http.post("/api/push/hold", json={}, headers=CONTROL).raise_for_status()
        began = time.monotonic()
        rig.http.get("/healthz")
        held = time.monotonic() - began
        rig.http.post("/api/push/release", json={}, headers=CONTROL).raise_for_status()
        more.set()
        running.result()
    timing = timing_of(rig)
    assert timing["held"] >= held
    assert timing["gate"] < timing["held"]


def test_a_client_that_hangs_up_before_the_first_token(rig: ProxyWithEngine) -> None:
    rig.engine.wait_before(0)
    body = {"messages": HELLO, "stream": True}
    hang_up(f"{rig.url}{CHAT}", body, once=lambda: rig.engine.requests)
    [turn] = eventually(rig.turns)
    assert turn.untrainable == "aborted"
    assert turn.timing is not None
    assert set(turn.timing) <= STREAMED
    assert "prefill" in turn.timing
