"""Spans of other libraries become rollouts, with turns, in whatever order they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
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
from support.proxy.servers import HeldWriter, serving
from tracegrad.events import Outcome
from tracegrad.proxy import create_app
from tracegrad.proxy.config import ProxySettings
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


def test_a_trace_is_a_rollout(http: httpx.Client, store: Store) -> None:
    send(http, first(), tool(), second(), root())
    [row] = store.rollouts()
    assert (row.rollout_id, row.agent, row.outcome) == (TRACE, "planner", Outcome.COMPLETED)
    assert (row.opened_at, row.finished_at) == (T0 / 1e9 + 1, T0 / 1e9 + 9)
    one, two = store.rollout_turns(TRACE)
    assert one.request == {"model": "m", "messages": [{"role": "user", "content": "Rain?"}]}
    assert one.response is not None
    assert one.response["choices"][0]["message"] == {"role": "assistant", "content": "Where?"}
    assert (one.dialect, one.model, one.finish_reason) == ("otel", "m", "stop")
    assert (one.untrainable, len(one.prompt_token_ids)) == ("no_tokens", 0)
    assert (one.parent_span_id, one.created_at) == (span_id(2), T0 / 1e9 + 2)
    assert (one.parent_id, one.fork_reason) == (None, None)
    assert (two.parent_id, two.fork_reason) == (one.turn_id, None)
    assert names(store, TRACE) == ["agent", "chat", "tool", "chat"]


@pytest.mark.parametrize("order", permutations(range(4)), ids=str)
def test_spans_come_in_any_order_one_by_one(
    http: httpx.Client, store: Store, order: Sequence[int]
) -> None:
    spans = [first(), tool(), second(), root()]
    for number in order:
        send(http, spans[number])
    [row] = store.rollouts()
    assert (row.rollout_id, row.agent, row.outcome) == (TRACE, "planner", Outcome.COMPLETED)
    assert names(store, TRACE) == ["agent", "chat", "tool", "chat"]
    turns = {turn.parent_span_id: turn for turn in store.rollout_turns(TRACE)}
    assert set(turns) == {span_id(2), span_id(4)}
    if order.index(0) < order.index(2):
        assert turns[span_id(4)].parent_id == turns[span_id(2)].turn_id


def test_what_is_sent_again_changes_nothing(http: httpx.Client, store: Store) -> None:
    spans = [first(), second(), root()]
    send(http, *spans)
    before = (store.rollouts(), store.rollout_turns(TRACE), store.spans(TRACE))
    send(http, *spans)
    for each in spans:
        send(http, each)
    assert (store.rollouts(), store.rollout_turns(TRACE), store.spans(TRACE)) == before


def test_a_store_that_was_full_has_all_in_the_end(
    http: httpx.Client, store: Store, writer: HeldWriter
) -> None:
    writer.broken = True
    spans = [first(), second(), root()]
    answer = http.post("/v1/traces", json=export(spans))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    writer.broken = False
    send(http, *spans)
    one, two = store.rollout_turns(TRACE)
    assert two.parent_id == one.turn_id
    assert store.rollout(TRACE).summary.outcome == Outcome.COMPLETED


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
    http: httpx.Client, store: Store, how: Json, error: str | None
) -> None:
    send(http, first(), root(**how))
    [row] = store.rollouts()
    assert (row.outcome, row.error) == (Outcome.AGENT_ERROR, error)


def test_conversations_are_tags_and_the_service_is_the_agent(
    http: httpx.Client, store: Store
) -> None:
    call = span(2, "chat", chat(1, **{"gen_ai.conversation.id": "c-1"}), parent=1, at=(2, 3))
    chain = {
        "openinference.span.kind": "CHAIN",
        "session.id": "s-1",
        "metadata": '{"thread_id": "t-1"}',
    }
    send(http, call, root(chain), **{"service.name": "forecasts"})
    other = "f" * 32
    send(http, span(7, "chat", chat(1, **{"session.id": "s-1"}), trace=other))
    mine, theirs = store.rollout(TRACE), store.rollout(other)
    assert mine.summary.agent == "forecasts"
    assert dict(mine.summary.tags) == {
        "gen_ai.conversation.id": "c-1",
        "session.id": "s-1",
        "thread_id": "t-1",
    }
    assert (dict(theirs.summary.tags), len(theirs.turns)) == ({"session.id": "s-1"}, 1)


def test_a_named_rollout_is_its_namers_to_finish(http: httpx.Client, store: Store) -> None:
    named = {"tracegrad.rollout": "r1"}
    send(http, first(), root(AGENT | {"tracegrad.rollout": "r1"}), **named)
    [row] = store.rollouts()
    assert (row.rollout_id, row.outcome, row.turns) == ("r1", None, 1)


def test_a_named_span_names_its_trace(http: httpx.Client, store: Store) -> None:
    send(http, span(5, "step", {"tracegrad.rollout": "r1"}, parent=1, at=(2, 8)))
    send(http, first(), tool())
    send(http, second(), root())
    [row] = store.rollouts()
    assert (row.rollout_id, row.outcome, row.turns) == ("r1", None, 2)
    assert len(store.spans("r1")) == 5


def test_in_a_trace_around_many_rollouts_a_call_has_one_of_its_own(
    http: httpx.Client, store: Store
) -> None:
    send(http, *(span(n, "step", {"tracegrad.rollout": f"r{n}"}, parent=1) for n in (5, 6)))
    send(http, first(), span(8, "work", parent=1))
    assert {row.rollout_id: row.turns for row in store.rollouts()} == {"r5": 0, "r6": 0, TRACE: 1}
    assert names(store, TRACE) == ["chat"]


def test_a_trace_without_an_agent_stays_nobodys_until_one_comes(
    http: httpx.Client, store: Store
) -> None:
    send(http, span(3, "db", {"db.system": "sqlite"}, parent=1))
    send(http, span(4, "GET", {"http.request.method": "GET"}, trace="f" * 32))
    assert store.rollouts() == []
    send(http, first())
    assert sorted(names(store, TRACE)) == ["chat", "db"]
    send(http, span(1, "POST /ask", {"http.request.method": "POST"}, at=(1, 9)))
    [row] = store.rollouts()
    assert (row.rollout_id, row.outcome) == (TRACE, Outcome.COMPLETED)


@pytest.fixture
def restarted(engine_url: str, store: Store, writer: HeldWriter) -> Callable[[], Any]:
    """A proxy that knows nothing but what is stored."""

    @contextmanager
    def start(**settings: Any) -> Iterator[httpx.Client]:
        configured = ProxySettings(upstream=engine_url, **settings)
        with (
            serving(create_app(configured, store=store, writer=writer)) as url,
            httpx.Client(base_url=url, timeout=20) as client,
        ):
            yield client

    return start


def test_a_trace_goes_on_after_a_restart(
    http: httpx.Client, store: Store, restarted: Callable[[], Any]
) -> None:
    send(http, first())
    with restarted() as other:
        send(other, span(9, "plain", parent=1))
        send(other, second(), root())
    one, two = store.rollout_turns(TRACE)
    assert two.parent_id == one.turn_id
    assert len(store.spans(TRACE)) == 4
    assert store.rollout(TRACE).summary.outcome == Outcome.COMPLETED


def test_a_model_called_in_no_span_is_a_rollout_of_one_turn(
    http: httpx.Client, store: Store
) -> None:
    send(http, span(2, "chat", chat(1)))
    [row] = store.rollouts()
    assert (row.rollout_id, row.turns, row.outcome) == (TRACE, 1, Outcome.COMPLETED)


def test_texts_are_redacted_in_spans_turns_and_tags(
    store: Store, restarted: Callable[..., Any], tmp_path: Path
) -> None:
    key = "sk-" + "a1" * 20
    texts = [("user", f"My key is {key}")]
    call = chat(1) | {"gen_ai.input.messages": said(texts)}
    events = [("exception", {"exception.message": f"refused: {key}"})]
    with restarted(redact=["tracegrad.proxy.capture.redaction:secrets"]) as http:
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


def test_without_text_neither_turns_nor_spans_hold_what_was_said(
    store: Store, restarted: Callable[..., Any], tmp_path: Path
) -> None:
    with restarted(keep_text=False) as http:
        send(http, first(), tool(), second(), root(AGENT | {"input.value": "In Ulm."}))
    turns = store.rollout_turns(TRACE)
    assert [(turn.request, turn.finish_reason) for turn in turns] == [(None, "stop")] * 2
    [call, _] = [each for each in store.spans(TRACE) if each.name == "chat"]
    assert call.attributes["tracegrad.call.kind"] == "turn"
    assert call.attributes["gen_ai.request.model"] == "m"
    store.close()
    assert b"Ulm" not in (tmp_path / "store.db").read_bytes()


def test_a_parent_that_was_removed_meanwhile_is_none(http: httpx.Client, store: Store) -> None:
    send(http, first())
    prune(store, RetentionRule(selection=RolloutSelection(), also_untrained=True))
    assert store.rollouts() == []
    send(http, second())
    [turn] = store.rollout_turns(TRACE)
    assert (turn.parent_span_id, turn.parent_id) == (span_id(4), None)


# Scores


def evaluation(name: str, value: float, **more: Any) -> tuple[str, Json]:
    told = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": value}
    return "gen_ai.evaluation.result", told | more


def test_scores_are_rewards_of_their_turn_or_rollout(http: httpx.Client, store: Store) -> None:
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
    send(http, *spans)
    send(http, *spans)
    rewards = {(r.name, r.value, r.turn, r.source) for r in store.rewards(TRACE)}
    assert rewards == {
        ("polite", 1.0, 1, "otel"),
        ("liked", 0.5, None, "otel"),
        ("helpful", 0.25, None, "otel"),
        ("reward", 1.0, None, "otel"),
    }
    assert len(store.rewards(TRACE)) == 4
    assert store.rollout(TRACE).summary.reward == 1.0


def test_a_score_that_is_nobodys_is_told(http: httpx.Client, store: Store) -> None:
    lone = span(9, "evaluate", events=[evaluation("right", 1.0)])
    told = http.post("/v1/traces", json=export([lone])).json()["partialSuccess"]
    assert told["rejectedSpans"] == "0"
    assert "its score 'right' is no reward" in told["errorMessage"]
    assert store.rollouts() == []


def test_a_score_of_an_answer_finds_its_turn(http: httpx.Client, store: Store) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "model": "m", "max_tokens": 5}
    answer = http.post("/rollouts/r1/v1/messages", json=body).json()
    score = evaluation("right", 1.0, **{"gen_ai.response.id": answer["id"]})
    send(http, span(9, "evaluate", events=[score]))
    [reward] = store.rewards("r1")
    assert (reward.name, reward.value, reward.turn) == ("right", 1.0, 0)


@pytest.mark.parametrize("depth", [300, 990, 1020])
def test_what_is_nested_too_deeply_is_told_and_its_span_kept(
    http: httpx.Client, store: Store, depth: int
) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    tools = f'[{{"name": "weather", "parameters": {deep}}}]'
    calls = f'[{{"role": "assistant", "parts": [{{"type": "tool_call", "arguments": {deep}}}]}}]'
    texts = {"gen_ai.tool.definitions": tools, "gen_ai.output.messages": calls}
    answer = http.post("/v1/traces", json=export([span(2, "chat", chat(1, **texts)), root()]))
    assert answer.status_code == 200
    assert sorted(names(store, TRACE)) == ["agent", "chat"]
    told = answer.json().get("partialSuccess", {}).get("errorMessage", "")
    assert ("nested too deeply" in told) == (store.rollout_turns(TRACE) == [])
