"""`POST /api/feedback`, the SDK's function and the command for it."""

from __future__ import annotations

import math
import socket
import urllib.request
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest
from typer.testing import CliRunner

from support.engines.mock_engine import MODEL
from support.proxy.proxy_with_engine import ProxyWithEngine
from tracegrad import Feedback, feedback
from tracegrad.cli.app import app
from tracegrad.cli.commands.score import PATIENCE_S
from tracegrad.store import Store
from tracegrad.transport import REQUEST_TIMEOUT_S, ProxyRefused, ProxyUnreachable

Json = dict[str, Any]
HELLO = [{"role": "user", "content": "Hello"}]


def give(http: httpx.Client, *, key: str | None = None, **body: Any) -> Json:
    headers = {} if key is None else {"idempotency-key": key}
    answer = http.post("/api/feedback", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def refused(http: httpx.Client, *, key: str | None = None, **body: Any) -> Json:
    headers = {} if key is None else {"idempotency-key": key}
    answer = http.post("/api/feedback", json=body, headers=headers)
    assert answer.status_code in (404, 422), answer.text
    error: Json = answer.json()["error"]
    return error


def chat(rig: ProxyWithEngine, path: str, **body: Any) -> httpx.Response:
    return rig.http.post(f"/rollouts/{rig.rollout_id}{path}", json={"model": MODEL, **body})


def chat_id(rig: ProxyWithEngine) -> str:
    answer = chat(rig, "/v1/chat/completions", messages=HELLO).json()
    return str(answer["id"])


def stream_id(rig: ProxyWithEngine) -> str:
    stream = rig.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    return [chunk.id for chunk in stream][-1]


def message_id(rig: ProxyWithEngine) -> str:
    return str(chat(rig, "/v1/messages", messages=HELLO, max_tokens=64).json()["id"])


def response_id(rig: ProxyWithEngine) -> str:
    return str(chat(rig, "/v1/responses", input="Hello").json()["id"])


def gemini_id(rig: ProxyWithEngine) -> str:
    asked = {"contents": [{"role": "user", "parts": [{"text": "Hello"}]}]}
    path = f"/v1beta/models/{MODEL}:generateContent"
    return str(rig.http.post(f"/rollouts/r1{path}", json=asked).json()["responseId"])


@pytest.mark.parametrize("ask", [chat_id, stream_id, message_id, response_id, gemini_id])
def test_the_id_that_a_client_got_finds_its_turn(
    rig: ProxyWithEngine, ask: Callable[[ProxyWithEngine], str]
) -> None:
    chat_id(rig)
    answered = ask(rig)
    given = give(rig.http, response_id=answered, thumbs="up", scope="turn", comment="right")
    assert given["rollout_id"] == "r1"
    assert given["turn"] == 1
    give(rig.http, response_id=answered, thumbs="down")
    of_turn, of_rollout = rig.store.rewards("r1")
    assert (of_turn.turn, of_turn.value, of_turn.comment) == (1, 1.0, "right")
    assert (of_rollout.turn, of_rollout.value, of_rollout.name) == (None, 0.0, "reward")


def test_it_is_found_by_a_proxy_that_did_not_give_it(
    rig: ProxyWithEngine, serve_proxy: Any
) -> None:
    """Feedback comes when the proxy was started again; or to another worker."""
    answered = chat_id(rig)
    with serve_proxy() as later:
        assert give(later, response_id=answered, value=0.25)["rollout_id"] == "r1"
        error = refused(later, response_id="chatcmpl-" + 32 * "0", thumbs="up")
    assert error["code"] == "unknown_response"
    assert "no recorded answer has the id" in error["message"]


def test_it_is_revised_and_taken_back(rig: ProxyWithEngine) -> None:
    """Taken back it is unknown again, and not 0."""
    chat_id(rig)

    def rollout() -> tuple[float | None, str]:
        found = rig.store.rollout("r1").summary
        return found.reward, found.state

    finished = {"type": "rollout_finished", "rollout_id": "r1"}
    opened = {"type": "rollout_started", "rollout_id": "r1", "task_id": "t"}
    rig.http.post("/api/events", json={"events": [opened, finished]}).raise_for_status()
    assert rollout() == (None, "no_reward")
    give(rig.http, rollout_id="r1", value=0.75)
    give(rig.http, rollout_id="r1", thumbs="down")
    reward, state = rollout()
    assert reward == 0.0
    assert state not in ("no_reward", "named_reward")
    give(rig.http, rollout_id="r1", withdraw=True)
    assert rollout() == (None, "no_reward")
    give(rig.http, rollout_id="r1", value=0.5)
    assert rollout()[0] == 0.5
    assert [each.value for each in rig.store.rewards("r1")] == [0.75, 0.0, None, 0.5]


def test_the_same_key_again_changes_nothing(rig: ProxyWithEngine) -> None:
    chat_id(rig)
    first = give(rig.http, key="k1", rollout_id="r1", thumbs="up")
    assert give(rig.http, key="k1", rollout_id="r1", thumbs="up") == first
    error = refused(rig.http, key="k1", rollout_id="r1", thumbs="down")
    assert error["code"] == "idempotency_key_reused"
    assert refused(rig.http, key="k1", rollout_id="r2", thumbs="up")
    assert give(rig.http, key="k2", rollout_id="r1", thumbs="up") != first
    assert len(rig.store.rewards("r1")) == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"value": 1}, "give one of rollout_id and response_id"),
        ({"rollout_id": "r", "response_id": "x", "value": 1}, "give one of rollout_id and"),
        ({"rollout_id": "r"}, "give one of value, thumbs and withdraw"),
        ({"rollout_id": "r", "value": 1, "withdraw": True}, "give one of value, thumbs"),
        ({"response_id": "x", "turn": 1, "value": 1}, "turn goes with rollout_id"),
        ({"rollout_id": "r", "scope": "turn", "value": 1}, "scope goes with response_id"),
        ({"rollout_id": "r", "value": 1e7}, "value"),
        ({"rollout_id": "r", "thumbs": "sideways"}, "thumbs"),
        ({"rollout_id": "r", "value": 1, "stars": 5}, "stars"),
    ],
)
def test_wrong_bodies_name_the_field(rig: ProxyWithEngine, body: Json, words: str) -> None:
    assert words in refused(rig.http, **body)["message"]


def test_a_rollout_that_nobody_knows_is_said(rig: ProxyWithEngine) -> None:
    assert give(rig.http, rollout_id="typo", thumbs="up")["unknown_rollout"] is True


def test_who_gives_feedback_says_how_long_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ProxyUnreachable, match=r"did not answer within 0\.01 s; it may do"):
            feedback(1.0, rollout_id="r1", url=url, timeout_s=0.01)
    waited: list[float] = []

    def refuses(_opener: object, _request: object, *, timeout: float) -> None:
        waited.append(timeout)
        raise OSError("not there")

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", refuses)
    monkeypatch.setenv("TRACEGRAD_URL", url)
    for more in ({}, {"timeout_s": 7.0}):
        with pytest.raises(ProxyUnreachable, match="not there"):
            feedback(1.0, rollout_id="r1", **more)
    assert CliRunner().invoke(app, ["score", "r1", "1"]).exit_code == 3
    assert waited == [REQUEST_TIMEOUT_S, 7.0, PATIENCE_S]
    for no_time in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"^timeout_s: "):
            feedback(1.0, rollout_id="r1", timeout_s=no_time)


def test_the_function_and_the_command_say_what_became_of_it(
    rig: ProxyWithEngine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEGRAD_URL", rig.url)
    answered = chat_id(rig)
    given = feedback(
        "up", response_id=answered, scope="turn", idempotency_key="k", timeout_s=PATIENCE_S
    )
    assert given == Feedback(given.reward_id, "r1", 0, unknown_rollout=False, after_training=None)
    with pytest.raises(ProxyRefused, match="give one of rollout_id and response_id"):
        feedback(1.0)
    with pytest.raises(ProxyUnreachable):
        feedback(1.0, rollout_id="r1", url="http://127.0.0.1:1")

    def said(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["score", *arguments])
        return result.exit_code, result.output.strip()

    assert said("r1", "0.8", "--turn", "-1", "--why", "good") == (
        0,
        "turn -1 of rollout r1: stored",
    )
    assert said(answered, "down", "--response") == (0, "rollout r1: stored")
    assert said("r1", "withdraw") == (0, "rollout r1: taken back")
    code, line = said("r9", "1")
    assert code == 0
    assert "is the id right?" in line
    assert said("r1", "fine") == (
        2,
        "tracegrad: VALUE: 'fine' is no number; give one, up, down or withdraw",
    )
    code, line = said("r1", "1", "--url", "http://127.0.0.1:1")
    assert (code, "is --url http://127.0.0.1:1 right?" in line) == (3, True)
    monkeypatch.setenv("TRACEGRAD_URL", "http://127.0.0.1:1")
    code, line = said("r1", "1")
    assert (code, "is TRACEGRAD_URL right?" in line) == (3, True)
    monkeypatch.setenv("TRACEGRAD_URL", rig.url)
    assert said("r1", "1", "--url", "localhost:4141") == (
        2,
        "tracegrad: url: 'localhost:4141' is not the proxy's address; give scheme, host and port"
        " without /v1, such as http://127.0.0.1:4141",
    )
    code, line = said("r1", "up", "--json")
    assert orjson.loads(line)["rollout_id"] == "r1"
    comments = [each.comment for each in store.rewards("r1")]
    assert comments == [None, "good", None, None, None]
