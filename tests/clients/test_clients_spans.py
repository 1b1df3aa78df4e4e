"""Agents that other people's libraries instrument send their spans, and nothing else, here.

The libraries are unmodified, each in a process of its own (`support/traced_agent.py`). What two of
them sent before they took to today's conventions was recorded once (`support/recorded_spans`):
opentelemetry-instrumentation-openai-v2 2.4b0 needs opentelemetry-util-genai 0.4b0, older than the
one that its successor needs, and opentelemetry-instrumentation-openai 0.40.14 the conventions
(opentelemetry-semantic-conventions-ai) of its time, older than those of today's 0.62.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from support.agents.traced_agent import QUESTION, SYSTEM, TOOL
from support.engines.mock_engine import Answer, MockEngine, render
from support.proxy.proxy_with_engine import ProxyWithEngine, proxy_with_engine
from support.proxy.servers import EngineServer
from tracegrad.events import Outcome, Turn

SUPPORT = Path(__file__).resolve().parents[1] / "support"
ANSWER = "It rains in Ulm."
KEY = "k" * 32


@pytest.fixture
def engine() -> MockEngine:
    engine = MockEngine()
    engine.replies.extend([Answer("", tool_calls=[("weather", '{"city": "Ulm"}')]), Answer(ANSWER)])
    return engine


@pytest.fixture
def spans(
    engine_server: EngineServer, engine: MockEngine, new_store: Callable[[], Path]
) -> Iterator[ProxyWithEngine]:
    """A proxy that has nothing stored yet."""
    with proxy_with_engine(engine_server, engine, new_store()) as rig:
        yield rig


def run_agent(
    spans: ProxyWithEngine, families: str, model_url: str, *options: str, **more: str
) -> None:
    """`model_url`: where it calls its model. `more`: for its environment."""
    wanted = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": spans.url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        # OpenTelemetry's own leaves texts out unless it is asked for them.
        "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "span_only",
    }
    command = [
        sys.executable,
        str(SUPPORT / "agents" / "traced_agent.py"),
        families,
        model_url,
        *options,
    ]
    done = subprocess.run(
        command,
        env=os.environ | wanted | more,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def one_rollout(rig: ProxyWithEngine) -> list[Turn]:
    """The only rollout there is, finished, with the spans of its tool; its turns."""
    [row] = rig.store.rollouts()
    assert row.outcome == Outcome.COMPLETED
    spans = rig.store.spans(row.rollout_id)
    assert [each for each in spans if each.name in ("weather", "execute_tool weather")]
    assert len({each.trace_id for each in spans}) == 1
    return rig.turns_of(row.rollout_id)


def assert_all_told(rig: ProxyWithEngine, turns: list[Turn]) -> None:
    """The whole conversation stands in two turns, the second under the first."""
    one, two = turns
    assert (one.parent_id, two.parent_id) == (None, one.turn_id)
    assert {turn.dialect for turn in turns} == {"otel"}
    assert {turn.untrainable for turn in turns} == {"no_tokens"}
    assert [turn.finish_reason for turn in turns] == ["tool_calls", "stop"]
    assert [turn.model for turn in turns] == ["mock", "mock"]
    system, user, reply, result = two.request["messages"] if two.request else []
    assert (system, user) == (
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    )
    assert one.request is not None
    assert one.request["messages"] == [system, user]
    [call] = reply["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Ulm"}
    assert result == {"role": "tool", "tool_call_id": call["id"], "content": "Rain in Ulm."}
    assert one.response is not None
    assert one.response["choices"][0]["message"]["tool_calls"][0]["id"] == call["id"]
    assert two.response is not None
    assert two.response["choices"][0]["message"]["content"] == ANSWER
    for turn in turns:
        assert turn.request is not None
        assert turn.request["tools"] == [TOOL]


def assert_usage(engine: MockEngine, turns: list[Turn]) -> None:
    for turn, asked in zip(turns, engine.requests, strict=True):
        assert turn.response is not None
        prompt = render(asked["messages"], asked.get("tools"))
        assert turn.response["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize(
    ("families", "options"),
    [
        ("openinference", ()),
        ("traceloop", ("stream",)),
        ("otel", ()),
        ("openinference-langchain", ("stream",)),
        ("traceloop-langchain", ()),
        # Both at once: their spans lie within one another.
        ("openinference+traceloop", ()),
    ],
)
def test_spans_alone_make_a_rollout(
    spans: ProxyWithEngine, engine: MockEngine, families: str, options: tuple[str, ...]
) -> None:
    run_agent(spans, families, f"{spans.engine_url}/v1", *options)
    turns = one_rollout(spans)
    assert_all_told(spans, turns)
    assert_usage(engine, turns)
    [row] = spans.store.rollouts()
    by_langchain = families.endswith("langchain")
    assert row.agent == ("weather_agent" if by_langchain else "forecaster")
    if by_langchain:
        assert row.tags["thread_id"] == "th-1"
    elif families.startswith("openinference"):
        assert row.tags == {"session.id": "s-1"}
    limit = "max_completion_tokens" if families == "openinference-langchain" else "max_tokens"
    assert {turn.sampling["temperature"] for turn in turns} == {0.5}
    assert {turn.sampling[limit] for turn in turns} == {500}


def test_a_proxy_with_keys_takes_spans_by_one(
    engine_server: EngineServer, engine: MockEngine, new_store: Callable[[], Path]
) -> None:
    with proxy_with_engine(engine_server, engine, new_store(), admin_key=KEY) as spans:
        refused = httpx.post(f"{spans.url}/v1/traces", json={})
        assert refused.status_code == 401
        headers = {"OTEL_EXPORTER_OTLP_HEADERS": f"x-api-key={KEY}"}
        run_agent(spans, "otel", f"{spans.engine_url}/v1", **headers)
        assert len(one_rollout(spans)) == 2


def test_anthropics_client_tells_of_its_calls_too(
    engine_server: EngineServer, engine: MockEngine, new_store: Callable[[], Path]
) -> None:
    """Beside the spans of Traceloop's library there are those that the client sends itself,
    without texts. The model is behind another proxy, which speaks Anthropic's dialect."""
    with ExitStack() as stack:
        spans = stack.enter_context(proxy_with_engine(engine_server, engine, new_store()))
        vendor = stack.enter_context(proxy_with_engine(engine_server, engine, new_store()))
        run_agent(spans, "traceloop-anthropic", f"{vendor.url}/v1")
        [row] = spans.store.rollouts()
        turns = spans.turns_of(row.rollout_id)
        assert_all_told(spans, turns)
        assert (row.agent, row.outcome) == ("forecaster", Outcome.COMPLETED)


@pytest.mark.parametrize(
    ("families", "options"),
    [
        ("openinference", ()),  # by the answer's id
        ("otel", ("httpx",)),  # by the trace that the request carries
        ("traceloop", ("stream",)),
        ("openinference-langchain", ("stream",)),  # by what was said: it tells no id
        ("openinference+traceloop", ("httpx",)),
        ("traceloop-anthropic", ()),
    ],
)
def test_calls_through_the_proxy_are_turns_once(
    spans: ProxyWithEngine, families: str, options: tuple[str, ...]
) -> None:
    run_agent(spans, families, f"{spans.url}/v1", *options)
    turns = one_rollout(spans)
    assert [turn.dialect for turn in turns] == [
        "messages" if families.endswith("anthropic") else "chat"
    ] * 2
    assert all(turn.completion_token_ids for turn in turns), "with tokens"
    [row] = spans.store.rollouts()
    assert row.agent in ("forecaster", "weather_agent")


@pytest.mark.parametrize("recorded", ["openai_v2_2.4b0", "traceloop_openai_0.40.14"])
def test_earlier_libraries_tell_the_same(spans: ProxyWithEngine, recorded: str) -> None:
    export = (SUPPORT / "recorded_spans" / f"{recorded}.json").read_bytes()
    answer = httpx.post(
        f"{spans.url}/v1/traces", content=export, headers={"content-type": "application/json"}
    )
    assert (answer.status_code, answer.json()) == (200, {})
    turns = one_rollout(spans)
    # The recorded library had no way yet to tell the tools.
    told = [turn.request for turn in turns if turn.request is not None]
    if recorded.startswith("openai_v2"):
        for request in told:
            request.setdefault("tools", [TOOL])
    assert_all_told(spans, turns)
    usage = [turn.response["usage"]["prompt_tokens"] for turn in turns if turn.response]
    assert usage == [249, 337]
