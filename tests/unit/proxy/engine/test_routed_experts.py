"""Routed experts: asked for, recorded, and never seen by a client."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

from support.engines.byte_tokenizer import save_byte_tokenizer
from support.engines.mock_engine import MODEL, Answer, MockEngine, render
from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from support.proxy.servers import CONTROL, CONTROL_KEY
from support.system.log_lines import our_lines
from support.trainer.routing_files import routing_file
from tracegrad.events import Turn, token_id_array
from tracegrad.proxy.dialects.openai_chat import OpenAIChatDialect
from tracegrad.proxy.engine import routed_experts
from tracegrad.proxy.engine.completion import SampledCompletion
from tracegrad.proxy.engine.stream import EngineStream
from tracegrad.proxy.http import sse

Turns = Callable[..., list[Turn]]

HELLO = [{"role": "user", "content": "Hello"}]
ON = {"role": "user", "content": "And on?"}
PATH = "/rollouts/r1/v1/chat/completions"
START = "routed_experts_prompt_start"


def by_token(ids: Sequence[int]) -> NDArray[Any]:
    """[n, 3 layers, 2 experts] of 512; what comes before a token changes them."""
    read = np.cumsum(np.asarray(ids))[:, None, None]
    return ((read * [[3], [5], [7]] + [[0, 1]]) % 512).astype(np.uint16)


def of(turn: Turn) -> NDArray[Any]:
    assert turn.routed_experts is not None
    return np.load(io.BytesIO(turn.routed_experts))


def read_by(turn: Turn) -> list[int]:
    return [*turn.prompt_token_ids, *turn.completion_token_ids][:-1]


@pytest.fixture
def engine(engine: MockEngine) -> MockEngine:
    engine.routes = by_token
    return engine


@pytest.fixture
def exact(serve_proxy: ServeProxy, tmp_path: Path) -> Iterator[httpx.Client]:
    """A proxy that has the model's tokenizer, and knows that the engine tells its experts."""
    tokenizer = save_byte_tokenizer(tmp_path)
    with serve_proxy(tokenizer=tokenizer, routed_experts=True, control_key=CONTROL_KEY) as client:
        yield client


@pytest.fixture
def said() -> Iterator[None]:
    """What is said once a process is said anew."""
    routed_experts._said.clear()
    yield
    routed_experts._said.clear()


def ask(http: httpx.Client, messages: Sequence[Any], **more: Any) -> Any:
    body = {"model": MODEL, "messages": messages, **more}
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("shown", [{}, {"return_token_ids": True, "logprobs": True}])
def test_the_file_is_recorded_as_it_came_and_no_client_sees_it(
    rig: ProxyWithEngine, shown: dict[str, bool]
) -> None:
    choice = ask(rig.http, HELLO, **shown)["choices"][0]
    assert choice["routed_experts"] is None, "as an engine answers that tells none"
    assert ("token_ids" in choice) == bool(shown)
    [turn] = rig.turns()
    assert turn.routed_experts == routing_file(by_token(read_by(turn)))
    assert turn.untrainable is None
    assert "routed" not in str(turn.response)


def test_a_turn_that_goes_on_has_what_its_parent_has_not(
    engine: MockEngine, exact: httpx.Client, turns: Turns
) -> None:
    engine.replies += [Answer("first"), Answer("second"), Answer("third")]
    talk = list(HELLO)
    for _ in range(3):
        # A start of the client's own is none of ours.
        message = ask(exact, talk, **{START: 2})["choices"][0]["message"]
        talk += [{"role": "assistant", "content": message["content"]}, ON]
    path = turns()
    assert [turn.parent_id for turn in path] == [None, *(turn.turn_id for turn in path[:-1])]
    assert [request.get(START) for request in engine.requests] == [
        None,
        *(len(read_by(parent)) for parent in path[:-1]),
    ]
    joined = np.concatenate([of(turn) for turn in path])
    assert (joined == by_token(read_by(path[-1]))).all()


def test_a_fork_has_them_all(engine: MockEngine, exact: httpx.Client, turns: Turns) -> None:
    first = ask(exact, HELLO)["choices"][0]["message"]
    ask(exact, [{"role": "user", "content": "Hi"}, first, ON])
    assert START not in engine.requests[1]
    assert (of(turns()[1]) == by_token(read_by(turns()[1]))).all()


def test_each_choice_has_its_own(rig: ProxyWithEngine) -> None:
    rig.engine.replies += [Answer("one"), Answer("other")]
    ask(rig.http, HELLO, n=2)
    files = [turn.routed_experts for turn in rig.turns()]
    assert files == [routing_file(by_token([*render(HELLO), *b"one"])),
                     routing_file(by_token([*render(HELLO), *b"other"]))]  # fmt: skip


def test_each_prompt_of_a_text_completion_has_its_own(rig: ProxyWithEngine) -> None:
    rig.engine.replies += [Answer("one"), Answer("other")]
    body = {"model": MODEL, "prompt": ["a", "bc"], START: 1, "return_token_ids": True}
    answer = rig.http.post("/rollouts/r1/v1/completions", json=body).json()
    assert [choice["routed_experts"] for choice in answer["choices"]] == [None, None]
    assert START not in rig.engine.requests[0]
    assert [of(turn).tolist() for turn in rig.turns()] == [
        by_token(list(text)).tolist() for text in (b"aone", b"bcother")
    ]


def test_another_dialect_has_them_too(rig: ProxyWithEngine) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": HELLO}
    answer = rig.http.post("/rollouts/r1/v1/messages", json=body)
    assert "routed" not in answer.text
    assert (of(rig.turns()[0]) == by_token(read_by(rig.turns()[0]))).all()


def test_while_weights_are_pushed_whole_answers_stay_whole(
    engine: MockEngine, exact: httpx.Client, turns: Turns
) -> None:
    for what, body in (("hold", {"ttl_s": 60}), ("release", {})):
        answer = exact.post(f"/api/push/{what}", json=body, headers=CONTROL)
        assert answer.status_code == 200
    ask(exact, HELLO)
    assert "stream" not in engine.requests[0]
    assert turns()[0].routed_experts is not None


@pytest.mark.usefixtures("said")
def test_streams_have_none_and_that_is_logged(
    engine: MockEngine, exact: httpx.Client, turns: Turns, caplog: pytest.LogCaptureFixture
) -> None:
    first = ask(exact, HELLO)["choices"][0]["message"]
    talk = [*HELLO, {"role": "assistant", "content": first["content"]}, ON]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert "[DONE]" in exact.post(PATH, json={"messages": talk, "stream": True}).text
    assert START not in engine.requests[1]
    assert [turn.routed_experts is None for turn in turns()] == [False, True, True]
    assert turns()[1].untrainable is None
    [record] = [r for r in caplog.records if "routed_experts" in r.message]
    assert "streams" in record.message


@pytest.mark.usefixtures("said")
@pytest.mark.parametrize(
    "reported",
    [
        "no base64!",
        base64.b64encode(b"no file").decode(),
        base64.b64encode(routing_file(by_token(range(20)))).decode(),  # of more tokens than it has
        base64.b64encode(routing_file(by_token(range(4)).astype(np.float32))).decode(),
        base64.b64encode(routing_file(by_token(range(4)))[:-1]).decode(),
        base64.b64encode(routing_file(by_token([]))).decode(),
        7,
    ],
)
def test_what_cannot_be_read_is_dropped_and_logged_once(
    rig: ProxyWithEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reported: object,
) -> None:
    monkeypatch.setattr(rig.engine, "_routed", lambda *_: reported)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert ask(rig.http, HELLO)["choices"][0]["routed_experts"] is None
    for turn in rig.turns():
        assert (turn.routed_experts, turn.untrainable) == (None, None)
        assert turn.completion_token_ids.tolist() == Answer().token_ids
    assert len([r for r in caplog.records if "routed_experts" in r.message]) == 1


def test_a_stream_that_ends_with_them_does_not_show_them() -> None:
    body = {"model": MODEL, "messages": HELLO, "stream": True, "return_token_ids": True}
    stream = EngineStream(OpenAIChatDialect().parse(orjson.dumps(body), {}, {}), lambda: 0)
    choice = {"index": 0, "delta": {"content": "a"}, "token_ids": [97], "finish_reason": "stop"}
    last = {"id": "a", "choices": [{**choice, "routed_experts": "AAAA"}]}
    assert stream.feed(sse.encode_event(orjson.dumps(last))) == []
    assert stream.tail == [{"id": "a", "choices": [choice]}]


@pytest.mark.usefixtures("said")
def test_tokens_that_are_dropped_take_them_along(caplog: pytest.LogCaptureFixture) -> None:
    reply = SampledCompletion(prompt_token_ids=token_id_array(range(9)))
    reply.add([5], [-9999.0], 0)
    reported = orjson.dumps(base64.b64encode(routing_file(by_token(range(3)))).decode())
    routed_experts.set_routed_experts(reply, reported)
    assert (reply.discard_reason, reply.routed_experts) == ("no_logprobs", None)
    routed_experts.set_routed_experts(
        whole := SampledCompletion(prompt_token_ids=token_id_array(range(9))), reported
    )
    assert whole.routed_experts is None, "nothing was sampled"
    assert our_lines(caplog) == []


def test_a_server_that_knows_nothing_of_tokens_is_not_asked(
    engine: MockEngine, serve_proxy: ServeProxy, turns: Turns
) -> None:
    engine.tell_ids = False
    with serve_proxy(upstream_kind="openai", routed_experts=True) as client:
        assert ask(client, HELLO, **{START: 3})["choices"][0]["routed_experts"] is None
    assert START not in engine.requests[0]
    assert turns()[0].routed_experts is None
    assert orjson.dumps(turns()[0].request).count(START.encode()) == 1, "kept as it was sent"


def test_a_call_that_is_repeated_gets_its_answer_without_them(rig: ProxyWithEngine) -> None:
    ask(rig.http, HELLO)
    body = {"model": MODEL, "messages": HELLO}
    again = rig.http.post(PATH, json=body, headers={"x-stainless-retry-count": "1"})
    assert (again.status_code, len(rig.engine.requests), len(rig.turns())) == (200, 1, 1)
    assert "routed" not in again.text
