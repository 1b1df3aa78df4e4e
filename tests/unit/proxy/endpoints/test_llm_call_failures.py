"""What goes wrong around a call, and what the client, the log and the store get to see of it."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from support.engines.mock_engine import MODEL, Answer, logprobs_of, render
from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from support.proxy.raw_http import hang_up
from support.proxy.servers import CONTROL_KEY, eventually
from support.system.log_lines import our_lines
from tracegrad.proxy.http.errors import ENGINE_DIED
from tracegrad.store import Store
from tracegrad_trainer.utils.network import find_free_port

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/rollouts/r1/v1/chat/completions"
STORY = Answer("a story that breaks off")
CONTROL = {"authorization": f"Bearer {CONTROL_KEY}"}


@pytest.fixture
def dead_upstream(serve_proxy: ServeProxy) -> Iterator[httpx.Client]:
    """A proxy whose engine does not run."""
    with serve_proxy(upstream=f"http://127.0.0.1:{find_free_port()}", max_wait_s=0.3) as client:
        yield client


def test_a_client_that_hangs_up_leaves_an_aborted_turn(rig: ProxyWithEngine) -> None:
    say = Answer("a long story that nobody wants to hear")
    rig.engine.replies.append(say)
    never = rig.engine.wait_before(3)
    stream = rig.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    for _ in range(1 + 3):
        next(stream)
    stream.close()
    eventually(lambda: rig.engine.aborted)
    [turn] = eventually(rig.turns)
    assert turn.untrainable == "aborted"
    assert turn.finish_reason is None
    assert turn.prompt_token_ids.tolist() == render(HELLO)
    assert turn.completion_token_ids.tolist() == say.token_ids[:12]
    assert turn.completion_logprobs.tolist() == logprobs_of(say.token_ids)[:12]
    assert turn.policy_versions == ((0, 12),)
    never.set()


def test_a_client_that_hangs_up_on_a_whole_answer(rig: ProxyWithEngine) -> None:
    rig.engine.wait_before(0)
    hang_up(f"{rig.url}{CHAT}", {"messages": HELLO}, once=lambda: rig.engine.requests)
    eventually(lambda: rig.engine.aborted)
    [turn] = eventually(rig.turns)
    assert turn.untrainable == "aborted"
    assert turn.request["messages"] == HELLO
    assert len(turn.prompt_token_ids) == 0
    assert rig.http.get("/api/push").json()["in_flight"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_engines_error_is_relayed(rig: ProxyWithEngine, stream: bool) -> None:
    body = {"error": {"message": "too long", "type": "BadRequestError", "param": "n", "code": 400}}
    rig.engine.failure = (400, body, {})
    with pytest.raises(openai.BadRequestError) as caught:
        rig.client.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
    assert caught.value.body == body["error"]
    assert rig.store.rollouts() == []


def test_an_engine_that_asks_for_patience_is_relayed(rig: ProxyWithEngine) -> None:
    rig.engine.failure = (503, {"error": {"message": "busy"}}, {"retry-after": "7"})
    answer = rig.http.post(CHAT, json={"messages": HELLO})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert answer.json() == {"error": {"message": "busy"}}


@pytest.mark.parametrize("stream", [False, True])
def test_no_engine_is_a_503_to_try_again(
    dead_upstream: httpx.Client, store: Store, stream: bool
) -> None:
    answer = dead_upstream.post(CHAT, json={"messages": HELLO, "stream": stream})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "upstream_unreachable"
    assert "does not answer" in answer.json()["error"]["message"]
    assert dead_upstream.get("/v1/models").status_code == 503
    assert dead_upstream.get("/healthz").status_code == 200
    assert store.rollouts() == []


def test_a_pooled_connection_that_went_stale_is_not_an_error(serve_proxy: ServeProxy) -> None:
    """The engine's server drops idle connections; the call is sent again over a new one."""
    requests: list[bytes] = []
    answer = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\nno"

    def engine(listener: socket.socket) -> None:
        for answers in ((answer, b""), (answer,)):  # nothing to the second call, but a hang-up
            connection, _ = listener.accept()
            with connection:
                for each in answers:
                    requests.append(connection.recv(65536))
                    connection.sendall(each)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=engine, args=(listener,))
        thread.start()
        with serve_proxy(upstream=f"http://127.0.0.1:{listener.getsockname()[1]}") as http:
            for _ in range(2):
                answered = http.post(CHAT, json={"messages": HELLO})
                assert answered.status_code == 400
                assert answered.json()["error"]["message"] == "the engine answered 400: no"
        thread.join(60)
    assert len(requests) == 3
    assert all(b"return_token_ids" in request for request in requests)


@pytest.fixture
def dying(rig: ProxyWithEngine) -> ProxyWithEngine:
    """Its engine dies once, in place of the fourth chunk, and takes tokens in place of words."""
    rig.engine.takes_ids = True
    rig.engine.replies += [Answer("a story that breaks off"), Answer("t goes on")]
    rig.engine.break_at, rig.engine.faults_left = 3, 1
    return rig


@pytest.mark.parametrize("fault", ["break_at", "error_at"])
def test_a_stream_goes_on_behind_what_its_client_has(dying: ProxyWithEngine, fault: str) -> None:
    rig, first, rest = dying, list(b"a story that"), Answer("t goes on").token_ids
    rig.engine.break_at, rig.engine.error_words = None, ENGINE_DIED.decode()
    setattr(rig.engine, fault, 3)
    stream = rig.client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        stream=True,
        max_tokens=50,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "a story thatt goes on"
    assert [delta.role for delta in deltas if delta.role] == ["assistant"], "it is said once"
    assert len({chunk.id for chunk in chunks}) == 1
    asked, again = rig.engine.requests
    prompt = render(HELLO)
    assert again["kv_transfer_params"] == {"prompt_token_ids": [*prompt, *first]}
    assert (asked["max_tokens"], again["max_tokens"]) == (50, 50 - len(first))
    [turn] = rig.turns()
    assert (turn.untrainable, turn.finish_reason) == (None, "stop")
    assert turn.request["max_tokens"] == 50
    assert turn.prompt_token_ids.tolist() == prompt
    assert turn.completion_token_ids.tolist() == [*first, *rest]
    assert turn.completion_logprobs.tolist() == logprobs_of(first) + logprobs_of(rest)
    assert turn.policy_versions == ((0, len(first) + len(rest)),)
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(first + rest))
    assert rig.http.get("/api/push").json()["in_flight"] == 0


def test_the_versions_of_both_engines_are_kept(dying: ProxyWithEngine) -> None:
    never = dying.engine.wait_before(2)
    stream = dying.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    for _ in range(3):
        next(stream)
    dying.http.post("/api/push/hold", json={"drain_s": 0}, headers=CONTROL).raise_for_status()
    dying.http.post("/api/push/version", json={"version": 7}, headers=CONTROL).raise_for_status()
    dying.http.post("/api/push/release", headers=CONTROL).raise_for_status()
    never.set()
    list(stream)
    [turn] = dying.turns()
    assert turn.policy_versions == ((0, 8), (7, 4 + len(Answer("t goes on").token_ids)))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": HELLO, "max_tokens": 50}),
        ("/v1/responses", {"input": "Hello"}),
    ],
)
def test_a_stream_of_another_dialect_goes_on(
    dying: ProxyWithEngine, path: str, body: dict[str, Any]
) -> None:
    asked = {"model": MODEL, "stream": True, **body}
    text = dying.http.post(f"/rollouts/r1{path}", json=asked).text
    said = re.findall(r'"(?:delta|text)": ?"([^"]*)"', text)
    assert "a story thatt goes on" in "".join(said)
    [turn] = dying.turns()
    assert turn.untrainable is None
    assert bytes(turn.completion_token_ids.tolist()[:-1]) == b"a story thatt goes on"


@pytest.mark.parametrize(
    ("more", "reply", "left"),
    [
        ({"stop": ["!"]}, STORY, 3),
        ({"n": 2}, STORY, 3),
        ({"frequency_penalty": 0.5}, STORY, 3),
        ({"response_format": {"type": "json_object"}}, STORY, 3),
        ({"max_tokens": 12}, STORY, 3),
        ({}, Answer("", [("look", '{"q": 1, "much": "more"}')]), 2),
    ],
)
def test_what_cannot_go_on_is_an_error_and_an_aborted_turn(
    rig: ProxyWithEngine, more: dict[str, Any], reply: Answer, left: int
) -> None:
    """`left`: chunks of the reply that the engine does not come to."""
    rig.engine.takes_ids = True
    rig.engine.replies += [reply, reply]
    rig.engine.break_at, rig.engine.faults_left = -(-len(reply.token_ids) // 4) - left, 1
    stream = rig.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **more)
    with pytest.raises(openai.APIError, match="broke off"):
        list(stream)
    assert {turn.untrainable for turn in rig.turns()} == {"aborted"}
    assert len(rig.engine.requests) == 1


def test_a_stream_goes_on_once(rig: ProxyWithEngine) -> None:
    """What kills every engine that hears it is not carried around."""
    rig.engine.takes_ids = True
    rig.engine.replies += [Answer("a story that breaks off") for _ in range(3)]
    rig.engine.break_at = 3
    stream = rig.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="broke off"):
        list(stream)
    assert len(rig.engine.requests) == 2
    [turn] = rig.turns()
    assert turn.untrainable == "aborted"
    assert len(turn.completion_token_ids) == 24


@pytest.fixture
def pushed_to(rig: ProxyWithEngine) -> ProxyWithEngine:
    """Weights are pushed to its engine, which therefore streams to the proxy whatever the client
    asks for."""
    rig.http.post("/api/push/hold", json={"drain_s": 0}, headers=CONTROL).raise_for_status()
    rig.http.post("/api/push/release", headers=CONTROL).raise_for_status()
    return rig


@pytest.mark.parametrize("fault", ["break_at", "error_at"])
def test_an_engine_that_dies_in_a_whole_answer_is_asked_again(
    pushed_to: ProxyWithEngine, fault: str
) -> None:
    rig, said = pushed_to, Answer("a story that ends well")
    rig.engine.replies += [Answer("a story that breaks off"), said]
    setattr(rig.engine, fault, 3)
    rig.engine.error_words, rig.engine.faults_left = ENGINE_DIED.decode(), 1
    answer = rig.http.post(CHAT, json={"messages": HELLO}).json()
    assert answer["choices"][0]["message"]["content"] == "a story that ends well"
    broken, whole = rig.turns()
    assert (broken.untrainable, len(broken.completion_token_ids)) == ("aborted", 12)
    assert whole.untrainable is None
    assert whole.completion_token_ids.tolist() == said.token_ids
    assert answer["id"] == f"chatcmpl-{whole.turn_id}"
    assert broken.timing is not None
    assert whole.timing is not None
    assert whole.timing["queue"] > broken.timing["decode"], "the first attempt's time is in it"
    assert rig.http.get("/api/push").json()["in_flight"] == 0


def test_an_engine_that_dies_of_a_call_is_not_asked_for_ever(pushed_to: ProxyWithEngine) -> None:
    rig = pushed_to
    rig.engine.replies += [Answer("a story that breaks off") for _ in range(3)]
    rig.engine.break_at = 2
    answer = rig.http.post(CHAT, json={"messages": HELLO})
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "engine_died"
    assert len(rig.engine.requests) == 2
    assert [turn.untrainable for turn in rig.turns()] == ["aborted", "aborted"]


def test_an_error_inside_a_stream_is_relayed(rig: ProxyWithEngine) -> None:
    rig.engine.replies.append(Answer("a story that goes wrong"))
    rig.engine.error_at = 2
    stream = rig.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="EngineCore died"):
        list(stream)
    assert rig.turns()[0].untrainable == "aborted"


def test_an_answer_that_is_no_completion_is_a_502(rig: ProxyWithEngine) -> None:
    rig.engine.failure = (200, {"hello": "there"}, {})
    answer = rig.http.post(CHAT, json={"messages": HELLO})
    assert answer.status_code == 502
    assert answer.json()["error"]["type"] == "upstream_error"
    assert rig.store.rollouts() == []


def test_a_full_store_is_a_503_and_one_line(
    rig: ProxyWithEngine, caplog: pytest.LogCaptureFixture
) -> None:
    rig.writer.broken = True
    with caplog.at_level(logging.WARNING, "tracegrad.proxy"):
        for _ in range(3):
            answer = rig.http.post(CHAT, json={"messages": HELLO})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "store_unavailable"
        rig.writer.broken = False
        assert rig.http.post(CHAT, json={"messages": HELLO}).status_code == 200
    lines = our_lines(caplog)
    assert lines == [
        "disk is full; calls are answered with 503 until it can be written",
        "the store can be written again",
    ]
    [turn] = rig.turns()
    assert turn.parent_id is None
    assert turn.fork_reason is None, "what was not recorded is nothing to fork from"


def test_a_full_store_ends_a_stream_with_an_error(rig: ProxyWithEngine) -> None:
    rig.writer.broken = True
    seen = []
    stream = rig.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="disk is full"):
        seen.extend(chunk.choices[0].finish_reason for chunk in stream)
    assert seen
    assert "stop" not in seen
    text = rig.http.post(CHAT, json={"messages": HELLO, "stream": True}).text
    assert "[DONE]" not in text
    assert rig.http.post("/api/events", json={"events": []}).status_code == 503


def test_a_client_that_hangs_up_does_not_stop_the_commit(rig: ProxyWithEngine) -> None:
    rig.writer.hold()
    hang_up(f"{rig.url}{CHAT}", {"messages": HELLO}, once=lambda: rig.writer.waiting)
    assert rig.writer.waiting == 1
    rig.writer.release()
    [turn] = eventually(rig.turns)
    assert turn.untrainable is None


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{", None, "not JSON"),
        (b"[]", None, "not a JSON object"),
        (b"{}", "messages", "not a list"),
        (b'{"messages": []}', "messages", "at least one"),
        (b'{"messages": [{"role": "user"}, "hi"]}', "messages[1]", "role"),
        (b'{"messages": [{"content": "hi"}]}', "messages[0]", "role"),
        (b'{"messages": [{"role": "user"}], "stream": "yes"}', "stream", "true or false"),
        (b'{"messages": [{"role": "user"}], "n": 0}', "n", "less than 1"),
        (b'{"messages": [{"role": "user"}], "n": true}', "n", "integer"),
        (b'{"messages": [{"role": "user"}], "temperature": "hot"}', "temperature", "number"),
    ],
)
def test_a_wrong_body_is_refused_by_name(
    rig: ProxyWithEngine, body: bytes, param: str | None, words: str
) -> None:
    answer = rig.http.post(CHAT, content=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]
    assert rig.engine.requests == []


def test_a_body_that_is_too_large(serve_proxy: ServeProxy) -> None:
    with serve_proxy(max_body_mib=1) as http:
        answer = http.post(CHAT, content=b" " * (1 << 20) + b"{}")
    assert answer.status_code == 413
    assert "larger than 1 MiB" in answer.json()["error"]["message"]


def test_unknown_paths_and_methods_have_the_same_shape(rig: ProxyWithEngine) -> None:
    for answer, status in ((rig.http.get("/v1/nothing"), 404), (rig.http.get(CHAT), 405)):
        assert answer.status_code == status
        error: dict[str, Any] = answer.json()["error"]
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_ends_the_rollout_as_budget(
    rig: ProxyWithEngine, stream: bool
) -> None:
    said = "This model's maximum context length is 100 tokens. However, your prompt contains 200"
    rig.engine.failure = (
        400,
        {"error": {"message": said, "type": "BadRequestError", "code": 400}},
        {},
    )
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        rig.client.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    crashed = {"type": "rollout_finished", "rollout_id": "r1", "outcome": "agent_error"}
    rig.http.post("/api/events", json={"events": [crashed]}).raise_for_status()
    [turn] = rig.store.rollout_turns("r1")
    assert (turn.untrainable, turn.finish_reason) == ("over_length", "refused")
    [rollout] = rig.store.rollouts()
    assert rollout.outcome == "budget"


def test_an_agent_that_shortens_its_prompt_goes_on(rig: ProxyWithEngine) -> None:
    said = "This model's maximum context length is 100 tokens."
    rig.engine.failure = (
        400,
        {"error": {"message": said, "type": "BadRequestError", "code": 400}},
        {},
    )
    with pytest.raises(openai.BadRequestError):
        rig.client.chat.completions.create(model=MODEL, messages=HELLO)
    rig.engine.failure = None
    rig.client.chat.completions.create(model=MODEL, messages=HELLO)
    crashed = {"type": "rollout_finished", "rollout_id": "r1", "outcome": "agent_error"}
    rig.http.post("/api/events", json={"events": [crashed]}).raise_for_status()
    assert rig.store.rollouts()[0].outcome == "agent_error"


@pytest.mark.parametrize("ids", [[1.5, 2], ["a", "b"], [None, 1], [2**31, 1], [-1, 3], {}, "x", 7])
def test_ids_that_are_none_leave_a_turn_without_tokens(rig: ProxyWithEngine, ids: object) -> None:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hello"},
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
    }
    rig.engine.failure = (
        200,
        {"model": MODEL, "choices": [choice], "prompt_token_ids": [1, 2]},
        {},
    )
    answer = rig.http.post(CHAT, json={"messages": HELLO})
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    [turn] = rig.turns()
    assert (turn.untrainable, len(turn.completion_token_ids)) == ("no_tokens", 0)
