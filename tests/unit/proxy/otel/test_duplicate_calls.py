"""A call that was recorded on its way is not recorded again from its span."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.engines.mock_engine import Answer
from support.proxy.otlp_json import AGENT, TRACE, Json, chat, send, span, span_id
from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from support.proxy.servers import eventually
from tracegrad.events import Outcome
from tracegrad.store import Store

BODY = {"model": "m", "messages": [{"role": "user", "content": "Rain?"}]}
OTHER = "f" * 32


def inside(number: int, trace: str = TRACE) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{span_id(number)}-01"}


def ask(http: httpx.Client, path: str = "", headers: dict[str, str] | None = None) -> Json:
    answer = http.post(f"{path}/v1/chat/completions", json=BODY, headers=headers)
    assert answer.status_code == 200
    reported: Json = answer.json()
    return reported


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


def test_the_call_came_from_the_llm_span(rig: ProxyWithEngine) -> None:
    ask(rig.http, "/rollouts/r1", inside(2))
    send(rig.http, call(), span(1, "agent", AGENT))
    assert_one_turn(rig.store, "r1")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_call_came_from_a_span_inside_the_llm_span(
    rig: ProxyWithEngine, order: tuple[int, int]
) -> None:
    ask(rig.http, "/rollouts/r1", inside(4))
    post = span(4, "POST", {"http.request.method": "POST"}, parent=3)
    both = (post, span(3, "request", parent=2))
    for number in order:
        send(rig.http, both[number])
    send(rig.http, call())
    assert_one_turn(rig.store, "r1")


def test_a_call_that_the_engine_refused_is_no_turn_by_its_span_either(rig: ProxyWithEngine) -> None:
    rig.engine.failure = (500, {"error": {"message": "no"}}, {})
    rig.http.post("/rollouts/r1/v1/chat/completions", json=BODY, headers=inside(2))
    send(rig.http, call(error="no"))
    assert [(row.rollout_id, row.turns) for row in rig.store.rollouts()] == [("r1", 0)]


def test_the_answer_has_the_id_that_we_gave(rig: ProxyWithEngine) -> None:
    reported = ask(rig.http)
    [untitled] = rig.store.rollouts()
    send(rig.http, call(**{"gen_ai.response.id": reported["id"]}), span(1, "agent", AGENT))
    assert_one_turn(rig.store, untitled.rollout_id)
    [row] = rig.store.rollouts()
    assert (row.agent, row.outcome) == ("planner", Outcome.COMPLETED)


def test_an_answer_with_another_id_is_another_call(rig: ProxyWithEngine) -> None:
    ask(rig.http, "/rollouts/r1")
    send(rig.http, call(**{"gen_ai.response.id": "chatcmpl-other"}), span(1, "agent", AGENT))
    assert {row.rollout_id: row.turns for row in rig.store.rollouts()} == {"r1": 1, TRACE: 1}


def test_where_the_span_has_no_id_the_messages_decide(rig: ProxyWithEngine) -> None:
    rig.engine.replies.append(Answer("Where?"))
    ask(rig.http)
    [untitled] = rig.store.rollouts()
    now = rig.store.rollout_turns(untitled.rollout_id)[0].created_at
    late = call() | {"endTimeUnixNano": str(int((now + 1) * 1e9))}
    send(rig.http, late | {"startTimeUnixNano": str(int((now - 1) * 1e9))})
    assert_one_turn(rig.store, untitled.rollout_id)
    # The same words of another day are another call.
    send(rig.http, call(trace=OTHER))
    assert rig.store.rollout(OTHER).summary.turns == 1


def test_an_llm_root_does_not_end_a_rollout_without_a_name(rig: ProxyWithEngine) -> None:
    reported = ask(rig.http)
    send(rig.http, call(parent=None, **{"gen_ai.response.id": reported["id"]}))
    [row] = rig.store.rollouts()
    assert (row.turns, row.outcome) == (1, None)


def test_two_libraries_report_one_call_in_spans_around_one_another(rig: ProxyWithEngine) -> None:
    outer, inner = call(2), call(3, parent=2)
    root = span(1, "agent", AGENT)
    send(rig.http, inner, outer, root)
    send(rig.http, outer | {"traceId": OTHER}, root | {"traceId": OTHER})
    send(rig.http, inner | {"traceId": OTHER})
    for trace, told_by in ((TRACE, 3), (OTHER, 2)):
        [turn] = rig.store.rollout_turns(trace)
        assert turn.parent_span_id == span_id(told_by)


def test_two_libraries_report_one_call_side_by_side(rig: ProxyWithEngine) -> None:
    """A vendor's client may send a span of its own, without texts."""
    answered = {"gen_ai.response.id": "a-1"}
    silent = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"} | answered
    send(rig.http, span(9, "silent", silent, parent=1, at=(3, 4)), call(**answered))
    send(rig.http, span(8, "silent", silent, parent=1, at=(3, 4)))
    [turn] = rig.store.rollout_turns(TRACE)
    assert turn.parent_span_id == span_id(2)
    assert len(rig.store.spans(TRACE)) == 3


@pytest.mark.parametrize("named", [True, False])
def test_another_proxy_finds_it_in_the_store(
    rig: ProxyWithEngine, serve_proxy: ServeProxy, named: bool
) -> None:
    """By the span that the turn was called from, or by an id that was made of the turn's."""
    body = BODY | {"max_tokens": 5}
    answer = rig.http.post("/rollouts/r1/v1/messages", json=body, headers=inside(2))
    reported = {"tracegrad.rollout": "r1"} if named else {"gen_ai.response.id": answer.json()["id"]}
    with serve_proxy() as other:
        send(other, call(**reported))
    [row] = rig.store.rollouts()
    assert (row.rollout_id, row.turns) == ("r1", 1)
    assert [each.name for each in rig.store.spans("r1")] == ["chat"]


def test_a_call_whose_client_went_away_is_one_turn(rig: ProxyWithEngine) -> None:
    rig.engine.replies.append(Answer("It rains and rains."))
    gate = rig.engine.wait_before(1)
    body = BODY | {"stream": True}
    headers = inside(2)
    path = "/rollouts/r1/v1/chat/completions"
    with rig.http.stream("POST", path, json=body, headers=headers) as answer:
        next(answer.iter_raw())
    send(rig.http, call())
    gate.set()
    eventually(lambda: rig.store.rollout_turns("r1"))
    [turn] = rig.store.rollout_turns("r1")
    assert (turn.dialect, turn.untrainable) == ("chat", "aborted")
