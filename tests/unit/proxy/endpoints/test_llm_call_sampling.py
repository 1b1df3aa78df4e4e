"""Which sampling the engine is asked for, and what becomes of bent samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.chat.bent_sampling import BENT
from support.engines.mock_engine import MODEL, Answer, MockEngine
from support.proxy.proxy_with_engine import ServeProxy
from tracegrad.chat.sampling_params import DEFAULTS
from tracegrad.events import Turn
from tracegrad.inspect.asked_settings import asked_settings

PATH = "/rollouts/r1/v1/chat/completions"
NEUTRAL = {**DEFAULTS, "watermarking": False}
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **BENT}


@pytest.fixture
def sampling(serve_proxy: ServeProxy) -> Callable[[str], Any]:
    """Proxies that pass every field on: without that, beams and plug-ins of the engine's are
    refused."""
    return lambda kind: serve_proxy(sampling=kind, pass_unknown_fields=True)


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_is_asked_for_free_samples(
    sampling: Callable[[str], Any],
    engine: MockEngine,
    turns: Callable[..., list[Turn]],
    stream: bool,
) -> None:
    with sampling("free") as http:
        assert http.post(PATH, json={**ASK, "stream": stream}).status_code == 200
    asked = engine.requests[-1]
    assert said_of_sampling(asked) == NEUTRAL
    assert "logit_bias" not in asked
    [turn] = turns("r1")
    assert turn.untrainable is None
    assert turn.sampling["temperature"] == 1.0
    assert turn.request is not None
    assert turn.request["top_p"] == 0.9


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_the_engines_own_defaults_are_not_used(
    sampling: Callable[[str], Any],
    engine: MockEngine,
    turns: Callable[..., list[Turn]],
    path: str,
) -> None:
    """vLLM has a checkpoint's, or a watermark, where a request says nothing or null."""
    asked = {"prompt": "Hello"} if path == "completions" else {"messages": ASK["messages"]}
    with sampling("as_asked") as http:
        for said in ({}, {"top_p": None, "min_p": 0.1}, {"watermarking": True, "top_k": 40}):
            body = {"model": MODEL, **asked, **said}
            http.post(f"/rollouts/r1/v1/{path}", json=body).raise_for_status()
            given = {name: value for name, value in said.items() if value is not None}
            assert said_of_sampling(engine.requests[-1]) == NEUTRAL | given
    plain, *bent = turns("r1")
    assert plain.untrainable is None
    assert plain.sampling == DEFAULTS
    assert plain.request == {"model": MODEL, **asked}, "what the client sent stays"
    assert [turn.untrainable for turn in bent] == ["sampling_truncated"] * 2


def test_an_engine_that_is_not_vllm_is_told_what_was_asked_alone(
    serve_proxy: ServeProxy, engine: MockEngine
) -> None:
    with serve_proxy(upstream_kind="openai") as http:
        body = {"model": MODEL, "messages": ASK["messages"]}
        http.post(PATH, json=body).raise_for_status()
    assert said_of_sampling(engine.requests[-1]) == {}


def said_of_sampling(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name in NEUTRAL}


def test_by_default_the_proxy_samples_as_asked(
    sampling: Callable[[str], Any], engine: MockEngine, turns: Callable[..., list[Turn]]
) -> None:
    with sampling("as_asked") as http:
        assert http.post(PATH, json=ASK).status_code == 200
    assert engine.requests[-1]["top_k"] == 40
    [turn] = turns("r1")
    assert turn.untrainable == "greedy"


@pytest.mark.parametrize(
    "replaced",
    [
        {"vllm_xargs": {"watermark": 3}},
        {"logits_processors": ["ban:5"]},
        {"custom_logit_processor": "ban"},
        {"use_beam_search": True},
    ],
)
def test_samples_of_plug_ins_and_beams_are_not_the_policys(
    sampling: Callable[[str], Any], turns: Callable[..., list[Turn]], replaced: dict[str, Any]
) -> None:
    with sampling("as_asked") as http:
        body = {"model": MODEL, "messages": ASK["messages"], **replaced}
        assert http.post(PATH, json=body).status_code == 200
    assert turns("r1")[0].untrainable == "sampling_replaced"


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
JSON_ANSWER = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
# What is asked for, what of it the agent must leave out itself, and what the proxy then overrules.
KEPT_AND_FREED: dict[str, tuple[dict[str, Any], list[str], str | None]] = {
    "response format": ({"response_format": JSON_ANSWER}, ["response_format"], None),
    "beside greedy": (
        {"response_format": JSON_ANSWER, "temperature": 0},
        ["response_format"],
        "temperature = 0",
    ),
    "forced tool": (
        {"tools": [STRICT], "tool_choice": "required", "top_p": 0.9},
        [],
        'top_p = 0.9, tool_choice = "required" and strict tools',
    ),
    "named tool and tokens": (
        {
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "allowed_token_ids": [5, 6],
        },
        ["tool_choice", "allowed_token_ids"],
        None,
    ),
    "one call alone": (
        {"tools": [TOOL], "parallel_tool_calls": False, "allowed_token_ids": [5, 6]},
        ["allowed_token_ids"],
        "parallel_tool_calls = false",
    ),
    "greedy": ({"temperature": 0, "min_tokens": 3}, [], "temperature = 0 and min_tokens"),
}


@pytest.mark.parametrize("case", KEPT_AND_FREED)
def test_who_follows_the_advice_of_explain_is_trained(
    sampling: Callable[[str], Any], turns: Callable[..., list[Turn]], case: str
) -> None:
    asked, kept, freed = KEPT_AND_FREED[case]
    body = {"model": MODEL, "messages": ASK["messages"], **asked}

    def reason(kind: str, rollout: str, body: dict[str, Any]) -> str | None:
        with sampling(kind) as http:
            path = PATH.replace("r1", rollout)
            http.post(path, json=body).raise_for_status()
        return turns(rollout)[-1].untrainable

    untrainable = reason("as_asked", "r1", body)
    assert untrainable is not None
    advice = asked_settings(untrainable, turns("r1"))
    assert advice is not None
    named = [field.partition(" ")[0] for field in advice.kept]
    assert named == kept
    for field in kept:
        assert field in advice.fix
    assert (freed is None) or freed in advice.fix or not kept
    assert ("tart the proxy" in advice.fix) == (freed is not None)

    followed = {name: value for name, value in body.items() if name not in kept}
    proxy = "free" if "tart the proxy" in advice.fix else "as_asked"
    assert reason(proxy, "followed", followed) is None
    if kept:
        assert reason("free", "freed", body) == "constrained", "free alone does not help"
    if kept and freed:
        assert reason("as_asked", "left-out", followed) is not None


HELLO = {"role": "user", "content": "Hello"}
FLAT = {"type": "function", "name": "look", "parameters": SCHEMA}
ANTHROPICS = {"name": "look", "input_schema": SCHEMA}
GEMINIS_ONE = {"mode": "ANY", "allowedFunctionNames": ["look"]}
GEMINIS = [{"functionDeclarations": [{"name": "look", "parameters": SCHEMA}, {"name": "touch"}]}]
# Path, request, and its two choices: some tool, and this one.
FORCED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "chat": (
        "v1/chat/completions",
        {"model": MODEL, "messages": [HELLO], "tools": [TOOL]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "look"}}},
    ),
    "responses": (
        "v1/responses",
        {"model": MODEL, "input": [HELLO], "tools": [FLAT]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "name": "look"}},
    ),
    "responses of some tools": (
        "v1/responses",
        {"model": MODEL, "input": [HELLO], "tools": [FLAT]},
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [FLAT]}},
        {"tool_choice": {"type": "function", "name": "look"}},
    ),
    "messages": (
        "v1/messages",
        {"model": MODEL, "max_tokens": 9, "messages": [HELLO], "tools": [ANTHROPICS]},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "look"}},
    ),
    "gemini": (
        f"v1beta/models/{MODEL}:generateContent",
        {"contents": [{"role": "user", "parts": [{"text": "Hello"}]}], "tools": GEMINIS},
        {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
        {"toolConfig": {"functionCallingConfig": GEMINIS_ONE}},
    ),
}


@pytest.mark.parametrize("case", FORCED)
def test_a_call_of_some_tool_is_overruled_and_that_of_one_by_name_is_not(
    sampling: Callable[[str], Any],
    engine: MockEngine,
    turns: Callable[..., list[Turn]],
    case: str,
) -> None:
    path, body, some, one = FORCED[case]
    with sampling("free") as http:
        http.post(f"/rollouts/some/{path}", json={**body, **some}).raise_for_status()
        assert engine.requests[-1]["tool_choice"] == "auto"
        http.post(f"/rollouts/one/{path}", json={**body, **one}).raise_for_status()
        assert engine.requests[-1]["tool_choice"]["function"] == {"name": "look"}
    with sampling("as_asked") as http:
        http.post(f"/rollouts/asked/{path}", json={**body, **some}).raise_for_status()
        assert engine.requests[-1]["tool_choice"] == "required"
    [turn] = turns("some")
    assert turn.untrainable is None
    assert turn.request is not None
    assert some.items() <= turn.request.items(), "what the client sent stays"
    assert [turn.untrainable for turn in turns("one") + turns("asked")] == ["constrained"] * 2


# How each dialect asks for one tool call at a time.
ALONE: dict[str, dict[str, Any]] = {
    "chat": {"parallel_tool_calls": False},
    "responses": {"parallel_tool_calls": False},
    "messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", ALONE)
def test_one_call_alone_is_a_grammar_of_the_engines_or_the_first_that_came(
    sampling: Callable[[str], Any],
    engine: MockEngine,
    turns: Callable[..., list[Turn]],
    case: str,
    stream: bool,
) -> None:
    path, body, *_ = FORCED[case]
    body = {**body, **ALONE[case], "stream": stream}
    two = Answer("", [("look", '{"n": 1}'), ("look", '{"n": 4711}')])
    with sampling("free") as http:
        engine.replies.append(two)
        shown = http.post(f"/rollouts/free/{path}", json=body).raise_for_status().text
        assert "parallel_tool_calls" not in engine.requests[-1]
    assert "look" in shown
    assert "4711" not in shown
    [turn] = turns("free")
    assert turn.untrainable is None
    assert list(turn.completion_token_ids) == two.token_ids
    assert turn.response is not None
    [call] = turn.response["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"n": 1}'}
    with sampling("as_asked") as http:
        http.post(f"/rollouts/asked/{path}", json=body).raise_for_status()
        assert engine.requests[-1]["parallel_tool_calls"] is False
    assert turns("asked")[0].untrainable == "constrained"


@pytest.mark.parametrize("kind", ["as_asked", "free"])
@pytest.mark.parametrize(
    ("grammar", "reasons"),
    [
        ("asked", [None, None, None]),
        ("tools", [None, None, "constrained"]),
        ("chat", [None, "constrained", "constrained"]),
    ],
)
def test_what_the_engine_samples_by_a_grammar_of_its_own_is_not_trained(
    serve_proxy: ServeProxy,
    turns: Callable[..., list[Turn]],
    kind: str,
    grammar: str,
    reasons: list[str | None],
) -> None:
    text, chat = {"prompt": "Hello"}, {"messages": [HELLO]}
    with serve_proxy(sampling=kind, engine_grammar=grammar) as http:
        for path, asked in (
            ("completions", text),
            ("chat/completions", chat),
            ("chat/completions", {**chat, "tools": [TOOL]}),
        ):
            body = {"model": MODEL, **asked}
            http.post(f"/rollouts/r1/v1/{path}", json=body).raise_for_status()
    recorded = turns("r1")
    assert [turn.untrainable for turn in recorded] == reasons
    assert asked_settings("constrained", recorded) is None, "no field of theirs is at fault"
