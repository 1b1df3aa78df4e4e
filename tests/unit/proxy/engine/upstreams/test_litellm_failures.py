"""A teacher behind litellm refuses, breaks off, is silent or not there: the error."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import json

import pytest

from support.engines.raw_http_engine import ReceivedRequest, ServerConnection
from support.proxy.litellm_provider import (
    AGENT,
    ANTHROPIC_STREAM,
    CHAT,
    OPENAI_STREAM,
    STREAM,
    Json,
    Provider,
    Teacher,
    call,
    chunks,
    whole,
)
from tracegrad.proxy.engine.upstreams import UpstreamTimeouts
from tracegrad.proxy.http.errors import ApiError, BadRequest

# Without importing it: that is the adapter's, which sees to it that it keeps to itself.
if importlib.util.find_spec("litellm") is None:
    pytest.skip("litellm is not installed", allow_module_level=True)


@pytest.mark.parametrize("stream", [{}, STREAM])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (429, "rate_limit_error"),
        (503, "upstream_error"),
    ],
)
async def test_a_providers_refusal_keeps_its_status(
    provider: Provider, teacher: Teacher, status: int, kind: str, stream: Json
) -> None:
    provider.refusal = (status, "the teacher is indisposed")
    with pytest.raises(ApiError, match="the teacher is indisposed") as caught:
        await whole(teacher(), call(provider, **stream))
    assert (caught.value.status, caught.value.kind) == (status, kind)
    assert len(provider.engine.asked) == 1, "the client decides whether to try again"
    if status in (429, 503):
        assert caught.value.headers()["retry-after"] in ("7", "1")


async def test_a_prompt_that_is_too_long_has_its_own_code(
    provider: Provider, teacher: Teacher
) -> None:
    said = {
        "openai": "This model's maximum context length is 10 tokens.",
        "anthropic": "prompt is too long: 12 tokens > 10 maximum",
    }
    provider.refusal = (400, said[provider.name])
    with pytest.raises(BadRequest) as caught:
        await whole(teacher(), call(provider))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize("how", ["break_after", "end_after"])
async def test_a_stream_without_an_end_is_not_taken_for_a_whole_one(
    provider: Provider, teacher: Teacher, how: str
) -> None:
    setattr(provider, how, 7)
    with pytest.raises(ApiError) as caught:
        await chunks(teacher(), call(provider, **STREAM))
    assert caught.value.status >= 500


async def test_a_provider_that_is_silent_is_a_504(provider: Provider, teacher: Teacher) -> None:
    provider.hang.clear()
    upstream = teacher(timeouts=UpstreamTimeouts(read_s=0.2))
    for stream in ({}, STREAM):
        with pytest.raises(ApiError, match=r"sent nothing for 0\.2 s") as caught:
            await whole(upstream, call(provider, **stream))
        assert caught.value.status == 504


async def test_a_provider_that_is_not_there_is_an_error_to_try_again(
    provider: Provider, teacher: Teacher
) -> None:
    provider.engine.kill()
    with pytest.raises(ApiError) as caught:
        await whole(teacher(), call(provider))
    assert caught.value.status >= 500


async def test_who_leaves_a_stream_hangs_up(provider: Provider, teacher: Teacher) -> None:
    async def endless(asked: ReceivedRequest, line: ServerConnection) -> None:
        pieces = OPENAI_STREAM if provider.name == "openai" else ANTHROPIC_STREAM
        await line.begin()
        for number in range(10_000):
            piece = pieces[number if number < 7 else 6]
            kind = f"event: {piece['type']}\n" if "type" in piece else ""
            await line.piece(f"{kind}data: {json.dumps(piece)}\n\n".encode())
            await asyncio.sleep(0.01)

    provider.engine.behave = endless
    body = call(provider, **STREAM)
    async with teacher().request("POST", CHAT, body=body, headers=AGENT) as answer:
        assert await anext(answer.iter_any())
        assert provider.engine.open == 1
    async with asyncio.timeout(60):
        while provider.engine.open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
