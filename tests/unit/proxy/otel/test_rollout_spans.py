"""Stored rollouts as spans: what our own receiver reads in them is what was stored."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from support.proxy.proxy_with_engine import ProxyWithEngine
from support.transfer.rollout_records import rollout_records
from support.transfer.template_store import TOOLS, fill
from tracegrad.events import Json, Reward, Span, Turn
from tracegrad.proxy.otel.otlp import PROTOBUF, read_export
from tracegrad.proxy.otel.rollout_spans import rollout_spans
from tracegrad.proxy.otel.semconv import llm_call
from tracegrad.proxy.otel.semconv.evaluations import evaluations_of
from tracegrad.store import Store
from tracegrad.store.copy.export_records import RolloutRecord, iter_rollouts
from tracegrad.store.read.training_samples import turn_rewards
from tracegrad.store.read.turn_scopes import load_turn_scopes


def received(copy: RolloutRecord) -> list[Span]:
    body = encode_spans(rollout_spans(copy)).SerializeToString()
    export = read_export(body, PROTOBUF, 1000)
    assert (export.rejected, export.problem) == (0, "")
    return export.spans


def records(tmp_path: Any) -> dict[str, RolloutRecord]:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        fill(store)
        return {copy.rollout_id: copy for copy in iter_rollouts(store)}


def test_calls_say_what_was_said(tmp_path: Any) -> None:
    copy = records(tmp_path)["c1"]
    root, first, second = received(copy)
    assert (root.name, root.kind, root.parent_span_id) == ("invoke_agent shop", "internal", None)
    assert {span.trace_id for span in (first, second)} == {root.trace_id}
    assert {span.parent_span_id for span in (first, second)} == {root.span_id}
    assert {span.rollout_id for span in (root, first, second)} == {"c1"}
    call = llm_call(second)
    assert call is not None
    assert call.request["messages"][0] == {"role": "user", "content": "How many lamps?"}
    assert call.request["messages"][2]["content"] == "17"
    assert call.request["tools"] == TOOLS
    assert (call.reply or {})["content"] == "17 lamps"
    assert call.finish_reason == "length"
    turn = copy.turns[1]
    usage = (call.response or {})["usage"]
    assert usage["prompt_tokens"] == len(turn.prompt_token_ids)
    assert usage["completion_tokens"] == len(turn.completion_token_ids)
    assert second.attributes["tracegrad.turn_id"] == turn.turn_id
    assert second.attributes["tracegrad.policy_versions"] == f"[[{len(turn.turn_id)},9]]"
    [score] = evaluations_of(root)
    assert (score.name, score.value) == ("reward", 1.0)


def test_our_own_receiver_knows_who_called_and_for_which_model(rig: ProxyWithEngine) -> None:
    said: Any = {
        "request": {"messages": [{"role": "user", "content": "Rain?"}]},
        "response": {"choices": [{"message": {"role": "assistant", "content": "Yes."}}]},
    }
    copy = RolloutRecord(
        rollout_id="r",
        agent="planner",
        opened_at=99.5,
        turns=[
            turn("plain", **said),
            turn("named", agent_name="reviewer", asked_model="coder-model", **said),
        ],
    )
    body = encode_spans(rollout_spans(copy)).SerializeToString()
    sent = rig.http.post("/v1/traces", content=body, headers={"content-type": PROTOBUF})
    assert sent.status_code == 200
    with rig.store.reading() as connection:
        scopes = load_turn_scopes(connection, ["r"])
    assert [
        (each.model, each.asked_model, scopes[each.turn_id].agent)
        for each in rig.store.rollout_turns("r")
    ] == [("m", None, "planner"), ("m", "coder-model", "reviewer")]


def test_a_failed_rollout_is_an_error(tmp_path: Any) -> None:
    root, *_ = received(records(tmp_path)["b1"])
    assert (root.status, root.attributes["tracegrad.outcome"]) == ("error", "infra_error")


def turn(turn_id: str, **more: Any) -> Turn:
    nothing: Any = {
        "dialect": "chat",
        "model": "m",
        "prompt_token_ids": [],
        "completion_token_ids": [],
        "completion_logprobs": [],
        "policy_versions": (),
    }
    return Turn(turn_id=turn_id, rollout_id="r", created_at=100.0, **{**nothing, **more})


def span(span_id: str, parent: str | None, **more: Any) -> Span:
    ids: Json = {"trace_id": "0a" * 16, "span_id": span_id * 8, "name": f"s{span_id}"}
    return Span(
        **ids, parent_span_id=parent and parent * 8, start_ns=99 * 10**9, end_ns=10**11, **more
    )


def test_spans_of_the_agent_stay_around_their_calls() -> None:
    """In the agent's trace; a call that came as a span is that span."""
    attributes = {
        "nested": {"a": [1]},
        "big": 2**70,
        "texts": ["a", "b"],
        "otel.status_description": "no such tool",
        "otel.events": [{"name": "exception", "time_ns": 5, "attributes": {"x": 1}}],
    }
    copy = RolloutRecord(
        rollout_id="r",
        opened_at=99.5,
        spans=[
            span("aa", None),
            span("bb", "aa", status="error", attributes=attributes),
            span("cc", "ff", attributes={"gen_ai.operation.name": "chat"}),
        ],
        turns=[
            turn("in-a-tool", parent_span_id="bb" * 8, timing={"prefill": 0.25, "decode": 0.25}),
            turn("from-a-span", parent_span_id="cc" * 8, dialect="otel"),
            turn("alone", parent_span_id="ee" * 8),
        ],
        rewards=[
            Reward(rollout_id="r", value=0.5, turn=0, name="step", comment="good"),
            Reward(rollout_id="r", value=None),
        ],
    )
    root, inside, alone, a, b, c = received(copy)
    assert {each.trace_id for each in (root, inside, a, b, c)} == {"0a" * 16}
    assert [each.parent_span_id for each in (a, b, c)] == [root.span_id, "aa" * 8, root.span_id]
    assert (inside.parent_span_id, alone.parent_span_id) == ("bb" * 8, root.span_id)
    assert (inside.start_ns, inside.end_ns) == (99_500_000_000, 100 * 10**9)
    assert [(each.name, each.value) for each in evaluations_of(inside)] == [("step", 0.5)]
    assert evaluations_of(root) == []
    assert b.status == "error"
    assert b.attributes == {
        "nested": '{"a":[1]}',
        "big": str(2**70),
        "texts": ["a", "b"],
        "service.name": "tracegrad",
        "otel.status_description": "no such tool",
        "otel.events": [{"name": "exception", "time_ns": 5, "attributes": {"x": 1}}],
    }
    assert (root.start_ns, root.end_ns) == (99 * 10**9, 10**11)


@settings(max_examples=100, deadline=None)
@given(rollout_records())
def test_every_rollout_can_be_sent(record: RolloutRecord) -> None:
    spans = received(record)
    assert len(spans) == len({each.span_id for each in spans}) == 1 + len(record.turns)
    assert spans == received(record)
    scores = {
        of.turn_id: [score.value for score in evaluations_of(each)]
        for each, of in zip(spans[1:], record.turns, strict=True)
    }
    assert {turn_id: values[-1] for turn_id, values in scores.items() if values} == {
        record.turns[index].turn_id: value
        for index, value in turn_rewards(record.rewards, record.turns).items()
    }
    whole = [reward.value for reward in record.rewards if reward.turn is None]
    assert [score.value for score in evaluations_of(spans[0])] == whole
    for each, of in zip(spans[1:], record.turns, strict=True):
        call = llm_call(each)
        assert call is not None
        assert call.finish_reason == of.finish_reason
        assert call.request["model"] == (of.asked_model or of.model)
        assert each.name == f"chat {of.asked_model or of.model}"
        assert each.attributes["gen_ai.response.model"] == of.model
        assert each.attributes.get("gen_ai.agent.name") == of.agent_name
        if of.response is not None and call.reply is not None:
            reply = of.response["choices"][0]["message"]
            assert (call.reply["content"] or "") == reply["content"]
            calls = [made["function"]["name"] for made in call.reply.get("tool_calls", ())]
            wanted = [made["function"]["name"] for made in reply.get("tool_calls", ())]
            assert calls == wanted
