"""Which state of its environment a call was made in: the key it says, and what was observed."""

from __future__ import annotations

from typing import Any

import pytest

from support.proxy.proxy_with_engine import ProxyWithEngine
from tracegrad.proxy.capture.recorder import observation_of
from tracegrad.task_ids import state_key

Json = dict[str, Any]

CHAT = "/v1/chat/completions"


def message(role: str, content: Any, **more: Any) -> Json:
    return {"role": role, "content": content, **more}


def called(call_id: str, arguments: str = "{}") -> Json:
    function = {"name": "look", "arguments": arguments}
    return message(
        "assistant", None, tool_calls=[{"id": call_id, "type": "function", "function": function}]
    )


@pytest.mark.parametrize("stream", [False, True])
def test_the_key_that_a_call_says_is_stored(rig: ProxyWithEngine, stream: bool) -> None:
    body = {"messages": [message("user", "hi")], "stream": stream}
    for key in ("board 7", "x" * 400, "grün".encode(), ""):
        headers = {"x-tracegrad-rollout": "r1", "x-tracegrad-state": key}
        rig.http.post(CHAT, json=body, headers=headers).raise_for_status()  # type: ignore[arg-type]
    rig.http.post(CHAT, json=body, headers={"x-tracegrad-rollout": "r1"}).raise_for_status()
    reported = [turn.state_key for turn in rig.turns()]
    assert reported[:2] == ["board 7", state_key("x" * 400)]
    assert reported[2] is not None
    assert reported[2].startswith("blake2b:")
    assert reported[3:] == [None, None]


@pytest.mark.parametrize("stream", [False, True])
def test_the_agent_that_a_call_names_is_stored(rig: ProxyWithEngine, stream: bool) -> None:
    body = {"messages": [message("user", "hi")], "stream": stream}
    names = ("planner", "gr%C3%BCn", "50% off", "x" * 300, "")
    for name in names:
        headers = {"x-tracegrad-rollout": "r1", "x-tracegrad-agent": name}
        rig.http.post(CHAT, json=body, headers=headers).raise_for_status()
    rig.http.post(CHAT, json=body, headers={"x-tracegrad-rollout": "r1"}).raise_for_status()
    found = [turn.agent_name for turn in rig.turns()]
    assert found == ["planner", "grün", "50% off", "x" * 200, None, None]


def test_another_way_to_the_same_observation_is_the_same_state(rig: ProxyWithEngine) -> None:
    """Two rollouts see the same behind different replies, ids and instructions."""
    ways = [
        [message("system", "It is noon."), message("user", "go"), called("c1", '{"by": "left"}')],
        [message("system", "It is one."), message("user", "go"), called("c2"), called("c3")],
    ]
    for number, way in enumerate(ways):
        headers = {"x-tracegrad-rollout": f"r{number}"}
        seen = message("tool", "a door", tool_call_id=f"t{number}")
        for messages in (way[:2], [*way, seen]):
            rig.http.post(CHAT, json={"messages": messages}, headers=headers).raise_for_status()
    (first, later), (other_first, other_later) = rig.turns("r0"), rig.turns("r1")
    assert first.observation == other_first.observation
    assert later.observation == other_later.observation
    assert first.observation != later.observation
    assert later.prompt_token_ids != other_later.prompt_token_ids


def test_an_observation_is_what_came_behind_the_last_reply() -> None:
    seen = observation_of([message("user", "go"), called("a"), message("tool", "a door")])
    assert seen == observation_of([message("tool", "a door")])
    assert seen != observation_of([message("user", "a door")]), "who says it counts"
    assert seen != observation_of([message("tool", "a wall")])
    two = [message("tool", "a"), message("tool", "b")]
    assert observation_of(two) != observation_of(two[::-1])
    assert observation_of(two) != observation_of([message("tool", "ab")])
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    assert observation_of([message("user", parts)]) != observation_of([message("user", parts[:1])])


def test_without_an_observation_there_is_none() -> None:
    assert observation_of([]) is None
    assert observation_of([message("system", "be good")]) is None
    assert observation_of([message("user", "go"), message("assistant", "Once upon")]) is None
    lone = observation_of([message("user", "\ud800")])
    assert lone is not None
