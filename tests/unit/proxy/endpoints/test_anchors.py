"""A rollout that begins behind an expert's turns, asked for and gone on with over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.engines.mock_engine import Answer, MockEngine
from support.proxy.proxy_with_engine import ServeProxy
from tracegrad.store import Store
from tracegrad.store.anchors.schedule import AnchorSettings
from tracegrad.turn_tree import extends

Json = dict[str, Any]


@pytest.fixture
def anchored(serve_proxy: ServeProxy) -> Iterator[httpx.Client]:
    with serve_proxy(anchors=AnchorSettings(window=1, group_size=1)) as client:
        yield client


def say(http: httpx.Client, rollout_id: str, messages: list[Json]) -> Json:
    """One call; its reply and what was asked are then the conversation."""
    path = f"/rollouts/{rollout_id}/v1/chat/completions"
    answer = http.post(path, json={"messages": messages}).raise_for_status().json()
    reply: Json = answer["choices"][0]["message"]
    return {"role": "assistant", "content": reply["content"]}


def finish(http: httpx.Client, rollout_id: str, reward: float, task_id: str | None = None) -> None:
    events: list[Json] = [
        {"type": "reward", "rollout_id": rollout_id, "value": reward},
        {"type": "rollout_finished", "rollout_id": rollout_id},
    ]
    if task_id is not None:
        opened = {"type": "rollout_started", "rollout_id": rollout_id, "task_id": task_id}
        events.insert(0, opened)
    http.post("/api/events", json={"events": events}).raise_for_status()


def test_an_agent_goes_on_behind_the_experts_turns(
    anchored: httpx.Client, engine: MockEngine, store: Store
) -> None:
    engine.replies += [Answer("left"), Answer("right"), Answer("straight on")]
    messages: list[Json] = [{"role": "user", "content": "go"}]
    for seen in ("a door", "open"):
        messages += [say(anchored, "expert", messages), {"role": "user", "content": seen}]
    finish(anchored, "expert", 1.0, task_id="maze")

    asked = anchored.post("/api/anchors/next", json={"task_id": "maze", "tags": {"split": "x"}})
    assert asked.status_code == 201
    found = asked.json()
    assert (found["task_id"], found["anchor"], found["demonstration"]) == ("maze@1", 1, "expert")
    assert found["demonstration_turns"] == 2
    assert found["request"]["messages"] == messages[:3]
    said = [each["choices"][0]["message"]["content"] for each in found["responses"]]
    assert said == ["left"]

    say(anchored, found["rollout_id"], found["request"]["messages"])
    prefix, beside, own = store.rollout_turns(found["rollout_id"])
    assert own.parent_id == prefix.turn_id, "the policy's turn goes on from the expert's"
    assert extends(own.prompt_token_ids, prefix)
    assert own.observation is not None
    assert beside.sampling["taken"] is False
    assert store.rollout(found["rollout_id"]).summary.tags["split"] == "x"

    finish(anchored, found["rollout_id"], 1.0)
    moved = anchored.post("/api/anchors/next", json={"task_id": "maze"}).json()
    assert (moved["task_id"], moved["anchor"], moved["responses"]) == ("maze@0", 0, [])
    assert moved["request"]["messages"] == messages[:1]


def test_a_task_nobody_solved_begins_at_its_beginning(anchored: httpx.Client) -> None:
    found = anchored.post("/api/anchors/next", json={"task_id": "maze"}).json()
    assert (found["task_id"], found["demonstration"], found["request"]) == ("maze", None, None)


@pytest.mark.parametrize(
    ("body", "field"), [({}, "task_id"), ({"task_id": ""}, "task_id"), ({"task": "t"}, "task_id")]
)
def test_a_wrong_question_is_named(anchored: httpx.Client, body: Json, field: str) -> None:
    refused = anchored.post("/api/anchors/next", json=body)
    assert refused.status_code == 422
    assert refused.json()["error"]["message"].startswith(f"{field}: ")


def test_a_proxy_without_anchors_says_what_to_do(http: httpx.Client) -> None:
    refused = http.post("/api/anchors/next", json={"task_id": "maze"})
    assert refused.status_code == 409
    assert "[proxy.anchors]" in refused.json()["error"]["message"]


def test_the_texts_of_the_rollout_are_redacted(serve_proxy: ServeProxy, store: Store) -> None:
    redact = ["tracegrad.proxy.capture.redaction:secrets"]
    secret = "sk-" + "a1B2" * 12
    with serve_proxy(anchors=AnchorSettings(), redact=redact) as http:
        body = {"task_id": "maze", "task": {"say": secret}, "tags": {"by": secret}}
        found = http.post("/api/anchors/next", json=body).json()
    detail = store.rollout(found["rollout_id"])
    assert secret not in str(detail.task)
    assert detail.summary.tags["by"] == "[redacted]"
