"""What needs stored text, and fails clearly or forks with its reason where there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.engines.mock_engine import Answer
from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy
from tracegrad.cli.commands.redact import make_cleaner, pattern_hook
from tracegrad.proxy.config import ProxySettings
from tracegrad.store import Store
from tracegrad.store.maintenance import (
    RedactionRule,
    RetentionRule,
    RolloutSelection,
    TextRemovalRule,
    drop_text,
    prune,
    redact,
)

Json = dict[str, Any]

CHAT = "/rollouts/r1/v1/chat/completions"
EVERYTHING = RolloutSelection()


@pytest.fixture
def textless(serve_proxy: ServeProxy) -> Iterator[httpx.Client]:
    """A proxy that keeps no text."""
    with serve_proxy(keep_text=False) as client:
        yield client


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def said(client: httpx.Client, *messages: Json) -> Json:
    """The messages with the reply."""
    answer = client.post(CHAT, json={"messages": list(messages)})
    answer.raise_for_status()
    reply: Json = answer.json()["choices"][0]["message"]
    return reply


def test_text_is_kept_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProxySettings().keep_text
    monkeypatch.setenv("TRACEGRAD_PROXY_KEEP_TEXT", "false")
    assert not ProxySettings().keep_text


def test_without_text_there_are_tokens_and_the_conversation_is_one_path(
    textless: httpx.Client, store: Store
) -> None:
    reply = said(textless, user("hello"))
    said(textless, user("hello"), reply, user("more"))
    first, second = store.rollout_turns("r1")
    assert second.parent_id == first.turn_id
    assert (second.fork_reason, second.request, second.response) == (None, None, None)
    assert first.prompt_token_ids
    assert first.completion_token_ids
    assert len(first.completion_logprobs) == len(first.completion_token_ids)


def test_without_text_spans_hold_only_what_they_are(textless: httpx.Client, store: Store) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add()
    span.trace_id, span.span_id, span.name = b"t" * 16, b"s" * 8, "tool"
    for key, value in {"tracegrad.rollout": "r1", "input.value": "secret"}.items():
        span.attributes.add(key=key).value.string_value = value
    headers = {"content-type": "application/x-protobuf"}
    textless.post("/v1/traces", content=request.SerializeToString(), headers=headers)
    [stored] = store.spans("r1")
    assert stored.attributes == {"tracegrad.rollout": "r1", "input.value": "[dropped]"}


@pytest.mark.parametrize("path", ["/rollouts/r1/v1/responses", "/v1/responses"])
def test_without_text_a_response_cannot_be_continued_by_its_id(
    textless: httpx.Client, store: Store, path: str
) -> None:
    first = textless.post(path, json={"model": "m", "input": "hello"}).json()
    body = {"model": "m", "input": "more", "previous_response_id": first["id"]}
    answer = textless.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "previous_response_not_found"
    assert "Its text is not stored" in error["message"]
    assert store.turn_counts().captured == 1


def test_the_error_of_an_unknown_response_does_not_mention_missing_text(
    rig: ProxyWithEngine,
) -> None:
    body = {"model": "m", "input": "more", "previous_response_id": "resp_nothing"}
    error = rig.http.post("/v1/responses", json=body).json()["error"]
    assert error["message"] == "Previous response with id 'resp_nothing' not found."


def redacted(store: Store, text: str) -> None:
    clean = make_cleaner([pattern_hook(text, literal=True)])
    redact(store, RedactionRule(selection=EVERYTHING, clean=clean, name="a text"))


@pytest.mark.parametrize("dropped", ["at capture", "since", "redacted"])
def test_without_text_a_repeat_is_sampled_again(
    rig: ProxyWithEngine, textless: httpx.Client, dropped: str
) -> None:
    rig.engine.replies += [Answer("first"), Answer("second")]
    client = textless if dropped == "at capture" else rig.http
    body = {"messages": [user("hello")]}
    client.post(CHAT, json=body).raise_for_status()
    if dropped == "since":
        drop_text(rig.store, TextRemovalRule(selection=EVERYTHING))
    elif dropped == "redacted":
        redacted(rig.store, "first")
    answer = client.post(CHAT, json=body, headers={"x-stainless-retry-count": "1"})
    assert answer.json()["choices"][0]["message"]["content"] == "second"
    assert [turn.parent_id for turn in rig.store.rollout_turns("r1")] == [None, None]


def test_a_response_whose_text_was_redacted_is_continued_as_a_fork(rig: ProxyWithEngine) -> None:
    rig.engine.replies += [Answer("the code is 1234"), Answer("yes")]
    path = "/rollouts/r1/v1/responses"
    first = rig.http.post(path, json={"model": "m", "input": "tell me"}).json()
    redacted(rig.store, "1234")
    body = {"model": "m", "input": "more", "previous_response_id": first["id"]}
    rig.http.post(path, json=body).raise_for_status()
    assert "the code is [redacted]" in json.dumps(rig.engine.requests[-1])
    second = rig.store.rollout_turns("r1")[1]
    assert (second.parent_id, second.fork_reason) == (None, "edited_content")


def test_after_a_restart_a_conversation_without_text_is_continued_by_its_tokens(
    rig: ProxyWithEngine, serve_proxy: ServeProxy
) -> None:
    reply = said(rig.http, user("hello"))
    drop_text(rig.store, TextRemovalRule(selection=EVERYTHING))
    with serve_proxy() as restarted:
        said(restarted, user("hello"), reply, user("more"))
        # What was said here, and the model never: neither by words nor by tokens.
        said(restarted, user("other"), {**reply, "content": "something else"}, user("more"))
        said(restarted, user("once more"))
    first, second, third, fourth = rig.store.rollout_turns("r1")
    assert (second.parent_id, second.fork_reason) == (first.turn_id, None)
    assert (third.parent_id, third.fork_reason) == (None, "no_text")
    assert (fourth.parent_id, fourth.fork_reason) == (None, "new_conversation")


@pytest.mark.parametrize("stream", [False, True])
def test_a_rollout_that_is_pruned_under_its_agent_goes_on_as_a_fork(
    rig: ProxyWithEngine, stream: bool
) -> None:
    reply = said(rig.http, user("hello"))
    [first] = rig.store.rollout_turns("r1")
    prune(
        rig.store, RetentionRule(selection=RolloutSelection(rollouts=("r1",)), also_untrained=True)
    )
    messages = [user("hello"), reply, user("more")]
    answer = rig.http.post(CHAT, json={"messages": messages, "stream": stream})
    assert answer.status_code == 200
    if stream:
        assert "[DONE]" in answer.text
        content = "".join(
            choice["delta"].get("content") or ""
            for line in answer.text.splitlines()
            if line.startswith("data: {")
            for choice in json.loads(line.removeprefix("data: "))["choices"]
        )
        following = {"role": "assistant", "content": content}
    else:
        following = answer.json()["choices"][0]["message"]
    [second] = rig.store.rollout_turns("r1")
    assert second.turn_id != first.turn_id
    assert (second.parent_id, second.fork_reason) == (None, "removed")
    # From there on it is a path again.
    said(rig.http, *messages, following, user("and more"))
    third = rig.store.rollout_turns("r1")[1]
    assert (third.parent_id, third.fork_reason) == (second.turn_id, None)
    # And so is what begins anew where the removed turn had ended.
    said(rig.http, *messages[:2], user("less"))
    assert rig.store.rollout_turns("r1")[2].fork_reason is not None
