"""Spans of other libraries become rollouts, with turns, in whatever order they come."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from support.proxy.otlp_json import (
    AGENT,
    T0,
    TOOL,
    TRACE,
    Json,
    chat,
    export,
    said,
    send,
    span,
    span_id,
)
from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from tracegrad.events import Outcome
from tracegrad.store import Store
from tracegrad.store.maintenance import RetentionRule, RolloutSelection, prune


def first(**more: Any) -> Json:
    return span(2, "chat", chat(1), parent=1, at=(2, 3)) | more


def tool(**more: Any) -> Json:
    return span(3, "tool", TOOL, parent=1, at=(4, 5)) | more


def second(**more: Any) -> Json:
    return span(4, "chat", chat(3), parent=1, at=(6, 7)) | more


def root(attributes: Json | None = None, **more: Any) -> Json:
    return span(1, "agent", AGENT if attributes is None else attributes, at=(1, 9), **more)


def names(store: Store, rollout_id: str) -> list[str]:
    return [each.name for each in store.spans(rollout_id)]


def test_a_trace_is_a_rollout(rig: ProxyWithEngine) -> None:
    send(rig.http, first(), tool(), second(), root())
    [row] = rig.store.rollouts()
    assert (row.rollout_id, row.agent, row.outcome) == (TRACE, "planner", Outcome.COMPLETED)
    assert (row.opened_at, row.finished_at) == (T0 / 1e9 + 1, T0 / 1e9 + 9)
    one, two = rig.store.rollout_turns(TRACE)
    assert one.request == {"model": "m", "messages": [{"role": "user", "content": "Rain?"}]}
    assert one.response is not None
    assert one.response["choices"][0]["message"] == {"role": "assistant", "content": "Where?"}
    assert (one.dialect, one.model, one.finish_reason) == ("otel", "m", "stop")
    assert (one.untrainable, len(one.prompt_token_ids)) == ("no_tokens", 0)
    assert (one.parent_span_id, one.created_at) == (span_id(2), T0 / 1e9 + 2)
    assert (one.parent_id, one.fork_reason) == (None, None)
    assert (two.parent_id, two.fork_reason) == (one.turn_id, None)
    assert names(rig.store, TRACE) == ["agent", "chat", "tool", "chat"]


@pytest.mark.parametrize("order", permutations(range(4)), ids=str)
def test_spans_come_in_any_order_one_by_one(rig: ProxyWithEngine, order: Sequence[int]) -> None:
    spans = [first(), tool(), second(), root()]
    for number in order:
        send(rig.http, spans[number])
    [row] = rig.store.rollouts()
    assert (row.rollout_id, row.agent, row.outcome) == (TRACE, "planner", Outcome.COMPLETED)
    assert names(rig.store, TRACE) == ["agent", "chat", "tool", "chat"]
    turns = {turn.parent_span_id: turn for turn in rig.store.rollout_turns(TRACE)}
    assert set(turns) == {span_id(2), span_id(4)}
    if order.index(0) < order.index(2):
        assert turns[span_id(4)].parent_id == turns[span_id(2)].turn_id


def test_what_is_sent_again_changes_nothing(rig: ProxyWithEngine) -> None:
    spans = [first(), second(), root()]
    send(rig.http, *spans)
    before = (rig.store.rollouts(), rig.store.rollout_turns(TRACE), rig.store.spans(TRACE))
    send(rig.http, *spans)
    for each in spans:
        send(rig.http, each)
    assert (rig.store.rollouts(), rig.store.rollout_turns(TRACE), rig.store.spans(TRACE)) == before


def test_a_store_that_was_full_has_all_in_the_end(rig: ProxyWithEngine) -> None:
    rig.writer.broken = True
    spans = [first(), second(), root()]
    answer = rig.http.post("/v1/traces", json=export(spans))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    rig.writer.broken = False
    send(rig.http, *spans)
    one, two = rig.store.rollout_turns(TRACE)
    assert two.parent_id == one.turn_id
    assert rig.store.rollout(TRACE).summary.outcome == Outcome.COMPLETED


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"error": "it broke"}, "it broke"),
        (
            {
                "error": "",
                "events": [
                    ("exception", {"exception.type": "KeyError", "exception.message": "'x'"})
                ],
            },
            "KeyError: 'x'",
        ),
        ({"error": ""}, None),
    ],
)
def test_a_root_that_failed_is_an_agents_error(
    rig: ProxyWithEngine, how: Json, error: str | None
) -> None:
    send(rig.http, first(), root(**how))
    [row] = rig.store.rollouts()
    assert (row.outcome, row.error) == (Outcome.AGENT_ERROR, error)


def test_conversations_are_tags_and_the_service_is_the_agent(rig: ProxyWithEngine) -> None:
    call = span(2, "chat", chat(1, **{"gen_ai.conversation.id": "c-1"}), parent=1, at=(2, 3))
    chain = {
        "openinference.span.kind": "CHAIN",
        "session.id": "s-1",
        "metadata": '{"thread_id": "t-1"}',
    }
    send(rig.http, call, root(chain), **{"service.name": "forecasts"})
    other = "f" * 32
    send(rig.http, span(7, "chat", chat(1, **{"session.id": "s-1"}), trace=other))
    mine, theirs = rig.store.rollout(TRACE), rig.store.rollout(other)
    assert mine.summary.agent == "forecasts"
    assert dict(mine.summary.tags) == {
        "gen_ai.conversation.id": "c-1",
        "session.id": "s-1",
        "thread_id": "t-1",
    }
    assert (dict(theirs.summary.tags), len(theirs.turns)) == ({"session.id": "s-1"}, 1)


def test_a_named_rollout_is_its_namers_to_finish(rig: ProxyWithEngine) -> None:
    named = {"tracegrad.rollout": "r1"}
    send(rig.http, first(), root(AGENT | {"tracegrad.rollout": "r1"}), **named)
    [row] = rig.store.rollouts()
    assert (row.rollout_id, row.outcome, row.turns) == ("r1", None, 1)


def test_a_named_span_names_its_trace(rig: ProxyWithEngine) -> None:
    send(rig.http, span(5, "step", {"tracegrad.rollout": "r1"}, parent=1, at=(2, 8)))
    send(rig.http, first(), tool())
    send(rig.http, second(), root())
    [row] = rig.store.rollouts()
    assert (row.rollout_id, row.outcome, row.turns) == ("r1", None, 2)
    assert len(rig.store.spans("r1")) == 5


def test_in_a_trace_around_many_rollouts_a_call_has_one_of_its_own(rig: ProxyWithEngine) -> None:
    send(rig.http, *(span(n, "step", {"tracegrad.rollout": f"r{n}"}, parent=1) for n in (5, 6)))
    send(rig.http, first(), span(8, "work", parent=1))
    assert {row.rollout_id: row.turns for row in rig.store.rollouts()} == {
        "r5": 0,
        "r6": 0,
        TRACE: 1,
    }
    assert names(rig.store, TRACE) == ["chat"]


def test_a_trace_without_an_agent_stays_nobodys_until_one_comes(rig: ProxyWithEngine) -> None:
    send(rig.http, span(3, "db", {"db.system": "sqlite"}, parent=1))
    send(rig.http, span(4, "GET", {"http.request.method": "GET"}, trace="f" * 32))
    assert rig.store.rollouts() == []
    send(rig.http, first())
    assert sorted(names(rig.store, TRACE)) == ["chat", "db"]
    send(rig.http, span(1, "POST /ask", {"http.request.method": "POST"}, at=(1, 9)))
    [row] = rig.store.rollouts()
    assert (row.rollout_id, row.outcome) == (TRACE, Outcome.COMPLETED)


def test_a_trace_goes_on_after_a_restart(rig: ProxyWithEngine, serve_proxy: ServeProxy) -> None:
    send(rig.http, first())
    with serve_proxy() as other:
        send(other, span(9, "plain", parent=1))
        send(other, second(), root())
    one, two = rig.store.rollout_turns(TRACE)
    assert two.parent_id == one.turn_id
    assert len(rig.store.spans(TRACE)) == 4
    assert rig.store.rollout(TRACE).summary.outcome == Outcome.COMPLETED


def test_a_model_called_in_no_span_is_a_rollout_of_one_turn(rig: ProxyWithEngine) -> None:
    send(rig.http, span(2, "chat", chat(1)))
    [row] = rig.store.rollouts()
    assert (row.rollout_id, row.turns, row.outcome) == (TRACE, 1, Outcome.COMPLETED)


def test_texts_are_redacted_in_spans_turns_and_tags(
    store: Store, serve_proxy: ServeProxy, tmp_path: Path
) -> None:
    key = "sk-" + "a1" * 20
    texts = [("user", f"My key is {key}")]
    call = chat(1) | {"gen_ai.input.messages": said(texts)}
    events = [("exception", {"exception.message": f"refused: {key}"})]
    with serve_proxy(redact=["tracegrad.proxy.capture.redaction:secrets"]) as http:
        send(http, span(2, "chat", call, parent=1, at=(2, 3)))
        send(http, root(AGENT | {"input.value": key, "session.id": key}, error="x", events=events))
    [turn] = store.rollout_turns(TRACE)
    assert turn.request is not None
    assert turn.request["messages"][0]["content"] == "My key is [redacted]"
    kept = store.rollout(TRACE)
    assert kept.summary.tags["session.id"] == "[redacted]"
    assert key not in json.dumps([each.attributes for each in store.spans(TRACE)])
    store.close()
    assert key.encode() not in (tmp_path / "store.db").read_bytes()


def test_without_text_neither_turns_nor_spans_hold_messages(
    store: Store, serve_proxy: ServeProxy, tmp_path: Path
) -> None:
    with serve_proxy(keep_text=False) as http:
        send(http, first(), tool(), second(), root(AGENT | {"input.value": "In Ulm."}))
    turns = store.rollout_turns(TRACE)
    assert [(turn.request, turn.finish_reason) for turn in turns] == [(None, "stop")] * 2
    [call, _] = [each for each in store.spans(TRACE) if each.name == "chat"]
    assert call.attributes["tracegrad.call.kind"] == "turn"
    assert call.attributes["gen_ai.request.model"] == "m"
    store.close()
    assert b"Ulm" not in (tmp_path / "store.db").read_bytes()


def test_a_parent_that_was_removed_meanwhile_is_none(rig: ProxyWithEngine) -> None:
    send(rig.http, first())
    prune(rig.store, RetentionRule(selection=RolloutSelection(), also_untrained=True))
    assert rig.store.rollouts() == []
    send(rig.http, second())
    [turn] = rig.store.rollout_turns(TRACE)
    assert (turn.parent_span_id, turn.parent_id) == (span_id(4), None)


# Scores


def evaluation(name: str, value: float, **more: Any) -> tuple[str, Json]:
    reported = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": value}
    return "gen_ai.evaluation.result", reported | more


def test_scores_are_rewards_of_their_turn_or_rollout(rig: ProxyWithEngine) -> None:
    flat = {
        "evaluations.0.evaluation.name": "polite",
        "evaluations.0.evaluation.score": 1,
        "trace.annotations.0.annotation.name": "liked",
        "trace.annotations.0.annotation.score": 0.5,
        "annotations.0.annotation.name": "only words",
        "annotations.0.annotation.label": "good",
    }
    scored = span(4, "chat", chat(3) | flat, parent=1, at=(6, 7))
    results = [evaluation("helpful", 0.25), evaluation("reward", 1.0)]
    label = ("gen_ai.evaluation.result", {"gen_ai.evaluation.name": "label only"})
    spans = [first(), scored, root(events=[*results, label])]
    send(rig.http, *spans)
    send(rig.http, *spans)
    rewards = {(r.name, r.value, r.turn, r.source) for r in rig.store.rewards(TRACE)}
    assert rewards == {
        ("polite", 1.0, 1, "otel"),
        ("liked", 0.5, None, "otel"),
        ("helpful", 0.25, None, "otel"),
        ("reward", 1.0, None, "otel"),
    }
    assert len(rig.store.rewards(TRACE)) == 4
    given = {r.name: r.given_at for r in rig.store.rewards(TRACE)}
    assert given["polite"] == T0 / 1e9 + 7, "when its span ended"
    assert rig.store.rollout(TRACE).summary.reward == 1.0


def test_a_score_of_no_rollout_is_reported(rig: ProxyWithEngine) -> None:
    lone = span(9, "evaluate", events=[evaluation("right", 1.0)])
    reported = rig.http.post("/v1/traces", json=export([lone])).json()["partialSuccess"]
    assert reported["rejectedSpans"] == "0"
    assert "its score 'right' is no reward" in reported["errorMessage"]
    assert rig.store.rollouts() == []


def test_a_score_of_a_rollout_that_nobody_knows_is_kept_and_reported(rig: ProxyWithEngine) -> None:
    scored = span(9, "evaluate", {"tracegrad.rollout": "typo"}, events=[evaluation("reward", 1.0)])
    reported = rig.http.post("/v1/traces", json=export([scored])).json()["partialSuccess"]
    assert "a score of rollout 'typo' is kept as its reward, but nobody" in reported["errorMessage"]
    assert [reward.value for reward in rig.store.rewards("typo")] == [1.0]


def test_a_score_of_an_answer_finds_its_turn(rig: ProxyWithEngine) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "model": "m", "max_tokens": 5}
    answer = rig.http.post("/rollouts/r1/v1/messages", json=body).json()
    score = evaluation("right", 1.0, **{"gen_ai.response.id": answer["id"]})
    send(rig.http, span(9, "evaluate", events=[score]))
    [reward] = rig.store.rewards("r1")
    assert (reward.name, reward.value, reward.turn) == ("right", 1.0, 0)


@pytest.mark.parametrize("depth", [300, 990, 1020])
def test_a_value_nested_too_deep_is_reported_and_its_span_kept(
    rig: ProxyWithEngine, depth: int
) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    tools = f'[{{"name": "weather", "parameters": {deep}}}]'
    calls = f'[{{"role": "assistant", "parts": [{{"type": "tool_call", "arguments": {deep}}}]}}]'
    texts = {"gen_ai.tool.definitions": tools, "gen_ai.output.messages": calls}
    answer = rig.http.post("/v1/traces", json=export([span(2, "chat", chat(1, **texts)), root()]))
    assert answer.status_code == 200
    assert sorted(names(rig.store, TRACE)) == ["agent", "chat"]
    reported = answer.json().get("partialSuccess", {}).get("errorMessage", "")
    assert ("nested too deeply" in reported) == (rig.store.rollout_turns(TRACE) == [])
