"""Sampling that bends the distribution: kept as asked, or overruled where the operator says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from support.mock_engine import MODEL, MockEngine
from support.proxy_rig import HeldWriter, serving
from tracegrad.proxy import create_app
from tracegrad.proxy.exact.messages import frame_of
from tracegrad.proxy.sampling import freed, settings_of, untrainable
from tracegrad.records import Turn
from tracegrad.settings import ProxySettings
from tracegrad.store import Store

FUNCTION = {"name": "look", "description": "", "parameters": {"type": "object"}}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
BENT: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1},
    "min_tokens": 3,
    "tools": [STRICT],
}
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **BENT}


@pytest.fixture
def free(engine_url: str, store: Store, writer: HeldWriter) -> Iterator[httpx.Client]:
    settings = ProxySettings(upstream=engine_url, sampling="free")
    with (
        serving(create_app(settings, store=store, writer=writer)) as url,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        yield client


def test_a_freed_call_can_be_trained() -> None:
    assert untrainable(BENT, settings_of(BENT)) == "greedy"
    body = freed(BENT)
    assert untrainable(body, settings_of(body)) is None
    assert body == {"temperature": 1.0, "tools": [{"type": "function", "function": FUNCTION}]}
    assert BENT["tools"][0]["function"]["strict"] is True, "what the client sent stays"


@pytest.mark.parametrize(
    "wish",
    [
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"stop": ["x"], "max_tokens": 5, "seed": 3},
    ],
)
def test_what_the_answer_is_for_stays(wish: dict[str, Any]) -> None:
    assert freed({**wish, "top_p": 0.5}) == {**wish, "temperature": 1.0}


def test_strict_tools_do_not_change_the_conversation() -> None:
    assert frame_of({"tools": [STRICT]}).key == frame_of(freed({"tools": [STRICT]})).key
    other = {"type": "function", "function": {**FUNCTION, "name": "touch"}}
    assert frame_of({"tools": [STRICT]}).key != frame_of({"tools": [other]}).key


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_is_asked_for_free_samples(
    free: httpx.Client, engine: MockEngine, turns: Callable[..., list[Turn]], stream: bool
) -> None:
    path = "/rollouts/r1/v1/chat/completions"
    assert free.post(path, json={**ASK, "stream": stream}).status_code == 200
    asked = engine.requests[-1]
    assert asked["temperature"] == 1.0
    assert not {"top_p", "top_k", "min_p", "logit_bias"} & set(asked)
    [turn] = turns("r1")
    assert turn.untrainable is None
    assert turn.sampling["temperature"] == 1.0
    assert turn.request is not None
    assert turn.request["top_p"] == 0.9


def test_unless_it_is_told_the_proxy_samples_as_asked(
    http: httpx.Client, engine: MockEngine, turns: Callable[..., list[Turn]]
) -> None:
    assert http.post("/rollouts/r1/v1/chat/completions", json=ASK).status_code == 200
    assert engine.requests[-1]["top_k"] == 40
    [turn] = turns("r1")
    assert turn.untrainable == "greedy"
