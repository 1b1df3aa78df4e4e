"""Clients' efforts before an engine that knows three, as vLLM does for GPT-OSS."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from support.engines.mock_engine import MODEL, MockEngine
from support.proxy.servers import EngineServer

HELLO = [{"role": "user", "content": "Hello"}]
CLAUDE = {"model": MODEL, "max_tokens": 9, "messages": HELLO}
GOOGLE = {"contents": [{"role": "user", "parts": [{"text": "Hello"}]}]}
MESSAGES, GEMINI = "v1/messages", f"v1beta/models/{MODEL}:generateContent"


class HarmonyEngine(MockEngine):
    """vLLM's words."""

    async def _chat(self, request: Request) -> Response:
        effort = (await request.json()).get("reasoning_effort")
        if effort in (None, "low", "medium", "high"):
            return await super()._chat(request)
        self.requests.append(await request.json())
        said = f"Harmony does not support reasoning_effort={effort!r}"
        if effort != "none":
            said = f"reasoning_effort={effort!r} is not supported by Harmony. Supported values are"
        return JSONResponse({"error": {"message": said, "type": "BadRequestError"}}, 400)


@pytest.fixture
def engine(engine_server: EngineServer) -> MockEngine:
    engine_server.engine = HarmonyEngine()
    return engine_server.engine


def google(**thinking: Any) -> dict[str, Any]:
    return {**GOOGLE, "generationConfig": {"thinkingConfig": thinking}}


@pytest.mark.parametrize(
    ("path", "body", "effort"),
    [
        (MESSAGES, {**CLAUDE, "thinking": {"type": "disabled"}}, "low"),
        (MESSAGES, {**CLAUDE, "output_config": {"effort": "xhigh"}}, "high"),
        (MESSAGES, {**CLAUDE, "output_config": {"effort": "max"}, "stream": True}, "high"),
        (GEMINI, google(thinkingBudget=0), "low"),
        (GEMINI, google(thinkingLevel="MINIMAL"), "low"),
        (GEMINI, google(thinkingLevel="XHIGH"), "high"),
    ],
)
def test_the_nearest_effort_is_asked_for_once_another_was_refused(
    http: httpx.Client, engine: MockEngine, path: str, body: dict[str, Any], effort: str
) -> None:
    for asked in (2, 3):  # it is remembered
        http.post(f"/{path}", json=body).raise_for_status()
        assert len(engine.requests) == asked
        assert engine.requests[-1]["reasoning_effort"] == effort


def test_an_effort_in_vllms_own_words_is_refused_as_by_vllm(
    http: httpx.Client, engine: MockEngine
) -> None:
    body = {"model": MODEL, "messages": HELLO, "reasoning_effort": "none"}
    assert http.post("/v1/chat/completions", json=body).status_code == 400
    assert len(engine.requests) == 1
