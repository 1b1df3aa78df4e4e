"""The model that an agent asks for, which the proxy may replace: kept, and selected by."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from support.proxy.servers import CONTROL, CONTROL_KEY
from tracegrad.events import Outcome, RolloutFinished, Turn
from tracegrad.protocol import MAX_MODEL_NAME
from tracegrad.proxy.dialects.registry import call_of
from tracegrad.store import Store
from tracegrad.store.read.steps import StepHistory
from tracegrad_trainer.batches import BatchSettings
from tracegrad_trainer.batches.turn_selector import is_selected, unmatched_patterns

PLANNER, CODER = "planner-model", "coder-model"
HELLO = [{"role": "user", "content": "hi"}]
CONTENTS = [{"role": "user", "parts": [{"text": "hi"}]}]


def ask(http: httpx.Client, model: str, rollout: str = "r1", **more: Any) -> None:
    body = {"model": model, "messages": HELLO, **more}
    http.post(f"/rollouts/{rollout}/v1/chat/completions", json=body).raise_for_status()


def for_training(store: Store, rollout: str) -> list[Turn]:
    """Its turns as a trainer reads them: without texts, and so without requests."""
    store.append([RolloutFinished(rollout_id=rollout, outcome=Outcome.COMPLETED)])
    turns = StepHistory(store).samples({rollout: 1.0})[rollout].turns
    assert {turn.request for turn in turns} == {None}
    return list(turns)


def trained(turns: list[Turn], *models: str) -> list[str | None]:
    """What the turns that these patterns select were asked for as."""
    settings = BatchSettings(models=models)
    return [turn.asked_model for turn in turns if is_selected(turn, settings, {})]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep_text", [False, True])
def test_turns_are_selected_by_the_name_that_their_agent_asked_for(
    rig: ProxyWithEngine, serve_proxy: ServeProxy, stream: bool, keep_text: bool
) -> None:
    with serve_proxy(model="policy", keep_text=keep_text) as http:
        for model in (PLANNER, CODER, "policy"):
            ask(http, model, stream=stream)
    assert {request["model"] for request in rig.engine.requests} == {"policy"}
    turns = for_training(rig.store, "r1")
    assert [(turn.asked_model, turn.model) for turn in turns] == [
        (PLANNER, "policy"),
        (CODER, "policy"),
        (None, "policy"),
    ]
    assert trained(turns, CODER) == [CODER]
    assert trained(turns, "*-model") == [PLANNER, CODER]
    assert trained(turns, f"!{PLANNER}") == [CODER, None]
    assert trained(turns, "policy") == [PLANNER, CODER, None]
    assert trained(turns, "policy", "!*-model") == [None]
    settings = BatchSettings(models=("policy", CODER, "codr-model"))
    assert [str(each) for each in unmatched_patterns(turns, settings, {})] == [
        "batches.models = 'codr-model' fits no turn; there are:"
        " 'coder-model', 'planner-model', 'policy'"
    ]


def test_a_candidate_is_selected_as_the_policy_is(
    rig: ProxyWithEngine, serve_proxy: ServeProxy
) -> None:
    with serve_proxy(model="policy", control_key=CONTROL_KEY) as http:
        canary = {"model": "policy-candidate", "share": 1.0}
        http.post("/api/push/canary", json=canary, headers=CONTROL).raise_for_status()
        for model in (PLANNER, CODER):
            ask(http, model)
    turns = for_training(rig.store, "r1")
    assert {turn.model for turn in turns} == {"policy-candidate"}
    assert trained(turns, "policy") == [PLANNER, CODER]
    assert trained(turns, CODER) == [CODER]
    assert trained(turns, "!policy-candidate") == trained(turns, "!policy") == []
    settings = BatchSettings(models=("policy", "policy-candidate", "judge"))
    assert [each.found for each in unmatched_patterns(turns, settings, {})] == [
        [CODER, PLANNER, "policy", "policy-candidate"]
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/chat/completions", {"model": CODER, "messages": HELLO}),
        ("v1/completions", {"model": CODER, "prompt": "hi"}),
        ("v1/responses", {"model": CODER, "input": "hi"}),
        ("v1/messages", {"model": CODER, "max_tokens": 9, "messages": HELLO}),
        (f"v1beta/models/{CODER}:generateContent", {"contents": CONTENTS}),
    ],
)
def test_every_dialect_has_it_and_a_call_that_is_read_again_too(
    rig: ProxyWithEngine, serve_proxy: ServeProxy, path: str, body: dict[str, Any]
) -> None:
    with serve_proxy(model="policy") as http:
        http.post(f"/rollouts/r1/{path}", json=body).raise_for_status()
    [turn] = rig.turns()
    assert turn.asked_model == CODER
    again = call_of(turn)
    assert again is not None
    assert again.body["model"] == CODER


def test_of_a_long_name_the_beginning_is_kept(
    rig: ProxyWithEngine, serve_proxy: ServeProxy
) -> None:
    with serve_proxy(model="policy") as http:
        ask(http, "x" * 100_000)
    [turn] = rig.turns()
    assert turn.asked_model == "x" * MAX_MODEL_NAME


def test_a_call_without_a_model_asks_for_none(
    rig: ProxyWithEngine, serve_proxy: ServeProxy
) -> None:
    with serve_proxy(model="policy") as http:
        http.post("/rollouts/r1/v1/chat/completions", json={"messages": HELLO}).raise_for_status()
    [turn] = rig.turns()
    assert (turn.model, turn.asked_model) == ("policy", None)
