"""A call that was recorded on its way is not recorded again from its span."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from support.engines.mock_engine import Answer, MockEngine
from support.proxy.otlp_json import AGENT, TRACE, Json, chat, send, span, span_id
from support.proxy.servers import HeldWriter, eventually, serving
from tracegrad.events import Outcome
from tracegrad.proxy import create_app
from tracegrad.proxy.config import ProxySettings
from tracegrad.store import Store

BODY = {"model": "m", "messages": [{"role": "user", "content": "Rain?"}]}
OTHER = "f" * 32


def inside(number: int, trace: str = TRACE) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{span_id(number)}-01"}


def ask(http: httpx.Client, path: str = "", headers: dict[str, str] | None = None) -> Json:
    answer = http.post(f"{path}/v1/chat/completions", json=BODY, headers=headers)
    assert answer.status_code == 200
    told: Json = answer.json()
    return told


def call(
    number: int = 2,
    *,
    parent: int | None = 1,
    trace: str = TRACE,
    error: str | None = None,
    **more: Any,
) -> Json:
    return span(number, "chat", chat(1, **more), parent=parent, trace=trace, error=error)


def assert_one_turn(store: Store, rollout_id: str) -> None:
    [row] = store.rollouts()
    assert (row.rollout_id, row.turns) == (rollout_id, 1)
    [turn] = store.rollout_turns(rollout_id)
    assert turn.dialect == "chat"
    [kept] = [each for each in store.spans(rollout_id) if each.name == "chat"]
    assert kept.attributes["tracegrad.call.kind"] == "recorded"


def test_the_call_came_from_the_llm_span(http: httpx.Client, store: Store) -> None:
    ask(http, "/rollouts/r1", inside(2))
    send(http, call(), span(1, "agent", AGENT))
    assert_one_turn(store, "r1")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_call_came_from_a_span_inside_the_llm_span(
    http: httpx.Client, store: Store, order: tuple[int, int]
) -> None:
    ask(http, "/rollouts/r1", inside(4))
    post = span(4, "POST", {"http.request.method": "POST"}, parent=3)
    both = (post, span(3, "request", parent=2))
    for number in order:
        send(http, both[number])
    send(http, call())
    assert_one_turn(store, "r1")


def test_a_call_that_the_engine_refused_is_no_turn_by_its_span_either(
    http: httpx.Client, store: Store, engine: MockEngine
) -> None:
    engine.failure = (500, {"error": {"message": "no"}}, {})
    http.post("/rollouts/r1/v1/chat/completions", json=BODY, headers=inside(2))
    send(http, call(error="no"))
    assert [(row.rollout_id, row.turns) for row in store.rollouts()] == [("r1", 0)]


def test_the_answer_has_the_id_that_we_gave(http: httpx.Client, store: Store) -> None:
    told = ask(http)
    [untitled] = store.rollouts()
    send(http, call(**{"gen_ai.response.id": told["id"]}), span(1, "agent", AGENT))
    assert_one_turn(store, untitled.rollout_id)
    [row] = store.rollouts()
    assert (row.agent, row.outcome) == ("planner", Outcome.COMPLETED)


def test_an_answer_with_another_id_is_another_call(http: httpx.Client, store: Store) -> None:
    ask(http, "/rollouts/r1")
    send(http, call(**{"gen_ai.response.id": "chatcmpl-other"}), span(1, "agent", AGENT))
    assert {row.rollout_id: row.turns for row in store.rollouts()} == {"r1": 1, TRACE: 1}


def test_where_the_span_has_no_id_what_was_said_tells(
    http: httpx.Client, store: Store, engine: MockEngine
) -> None:
    engine.replies.append(Answer("Where?"))
    ask(http)
    [untitled] = store.rollouts()
    now = store.rollout_turns(untitled.rollout_id)[0].created_at
    late = call() | {"endTimeUnixNano": str(int((now + 1) * 1e9))}
    send(http, late | {"startTimeUnixNano": str(int((now - 1) * 1e9))})
    assert_one_turn(store, untitled.rollout_id)
    # The same words of another day are another call.
    send(http, call(trace=OTHER))
    assert store.rollout(OTHER).summary.turns == 1


def test_an_llm_root_does_not_end_a_rollout_without_a_name(
    http: httpx.Client, store: Store
) -> None:
    told = ask(http)
    send(http, call(parent=None, **{"gen_ai.response.id": told["id"]}))
    [row] = store.rollouts()
    assert (row.turns, row.outcome) == (1, None)


def test_two_libraries_tell_of_one_call_in_spans_around_one_another(
    http: httpx.Client, store: Store
) -> None:
    outer, inner = call(2), call(3, parent=2)
    root = span(1, "agent", AGENT)
    send(http, inner, outer, root)
    send(http, outer | {"traceId": OTHER}, root | {"traceId": OTHER})
    send(http, inner | {"traceId": OTHER})
    for trace, told_by in ((TRACE, 3), (OTHER, 2)):
        [turn] = store.rollout_turns(trace)
        assert turn.parent_span_id == span_id(told_by)


def test_two_libraries_tell_of_one_call_side_by_side(http: httpx.Client, store: Store) -> None:
    """A vendor's client may send a span of its own, without texts."""
    answered = {"gen_ai.response.id": "a-1"}
    silent = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"} | answered
    send(http, span(9, "silent", silent, parent=1, at=(3, 4)), call(**answered))
    send(http, span(8, "silent", silent, parent=1, at=(3, 4)))
    [turn] = store.rollout_turns(TRACE)
    assert turn.parent_span_id == span_id(2)
    assert len(store.spans(TRACE)) == 3


@contextmanager
def another_proxy(engine_url: str, store: Store, writer: HeldWriter) -> Iterator[httpx.Client]:
    app = create_app(ProxySettings(upstream=engine_url), store=store, writer=writer)
    with serving(app) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.mark.parametrize("named", [True, False])
def test_another_proxy_finds_it_in_the_store(
    http: httpx.Client, store: Store, writer: HeldWriter, engine_url: str, named: bool
) -> None:
    """By the span that the turn was called from, or by an id that was made of the turn's."""
    body = BODY | {"max_tokens": 5}
    answer = http.post("/rollouts/r1/v1/messages", json=body, headers=inside(2))
    told = {"tracegrad.rollout": "r1"} if named else {"gen_ai.response.id": answer.json()["id"]}
    with another_proxy(engine_url, store, writer) as other:
        send(other, call(**told))
    [row] = store.rollouts()
    assert (row.rollout_id, row.turns) == ("r1", 1)
    assert [each.name for each in store.spans("r1")] == ["chat"]


def test_a_call_whose_client_went_away_is_one_turn(
    http: httpx.Client, store: Store, engine: MockEngine
) -> None:
    engine.replies.append(Answer("It rains and rains."))
    gate = engine.wait_before(1)
    body = BODY | {"stream": True}
    headers = inside(2)
    path = "/rollouts/r1/v1/chat/completions"
    with http.stream("POST", path, json=body, headers=headers) as answer:
        next(answer.iter_raw())
    send(http, call())
    gate.set()
    eventually(lambda: store.rollout_turns("r1"))
    [turn] = store.rollout_turns("r1")
    assert (turn.dialect, turn.untrainable) == ("chat", "aborted")
