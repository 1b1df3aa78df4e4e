"""Every route of an LLM call as bytes over HTTP, and how its errors are to be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anthropic.types
import openai.types.shared
import orjson

from support.engines.mock_engine import MODEL

Json = dict[str, Any]

PROMPT = "How is it?"
_MESSAGES = [{"role": "user", "content": PROMPT}]
_CONTENTS = [{"role": "user", "parts": [{"text": PROMPT}]}]


@dataclass(frozen=True)
class Refusal:
    kind: str
    message: str


@dataclass(frozen=True)
class RawCall:
    """`stream` gives the path and the body of the same call streamed; None where there is none.
    `refusal` reads the body of an error with the vendor's own type."""

    name: str
    path: str
    body: Json
    refusal: Callable[[bytes], Refusal]
    stream: tuple[str, Json] | None = None

    def __str__(self) -> str:
        return self.name

    def asked(self, *, stream: bool) -> tuple[str, Json]:
        if not stream:
            return self.path, self.body
        assert self.stream is not None
        return self.stream


def openai_refusal(raw: bytes) -> Refusal:
    body = orjson.loads(raw)
    error = openai.types.shared.ErrorObject.model_validate(body["error"], strict=True)
    assert set(body) == {"error"}
    assert error.type == "invalid_request_error"
    return Refusal(error.type, error.message)


def anthropic_refusal(raw: bytes) -> Refusal:
    body = orjson.loads(raw)
    kind = "request_too_large" if body["error"]["type"] == "request_too_large" else None
    if kind is None:  # one that is documented, but has no type in the library
        answer = anthropic.types.ErrorResponse.model_validate({"request_id": None, **body})
        assert answer.type == "error"
        assert answer.error.type in ("invalid_request_error", "not_found_error")
        kind = answer.error.type
    return Refusal(kind, body["error"]["message"])


def google_refusal(raw: bytes) -> Refusal:
    """`google.rpc.Status` in JSON, as `google.genai.errors` reads it."""
    body = orjson.loads(raw)
    error = body["error"]
    assert set(body) == {"error"}
    assert 400 <= error["code"] < 500
    assert error["status"] in ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION")
    return Refusal(error["status"], error["message"])


def _streamed(path: str, body: Json) -> tuple[str, Json]:
    return path, {**body, "stream": True}


_CHAT = {"model": MODEL, "messages": _MESSAGES}
_TEXT = {"model": MODEL, "prompt": PROMPT}
_RESPONSE = {"model": MODEL, "input": PROMPT}
_MESSAGE = {"model": MODEL, "max_tokens": 4096, "messages": _MESSAGES}
_GOOGLE = f"/v1beta/models/{MODEL}"

CHAT = RawCall(
    "chat",
    "/v1/chat/completions",
    _CHAT,
    openai_refusal,
    _streamed("/v1/chat/completions", _CHAT),
)
COMPLETIONS = RawCall(
    "completions", "/v1/completions", _TEXT, openai_refusal, _streamed("/v1/completions", _TEXT)
)
RESPONSES = RawCall(
    "responses", "/v1/responses", _RESPONSE, openai_refusal, _streamed("/v1/responses", _RESPONSE)
)
CLAUDE = RawCall(
    "messages", "/v1/messages", _MESSAGE, anthropic_refusal, _streamed("/v1/messages", _MESSAGE)
)
GEMINI = RawCall(
    "gemini",
    f"{_GOOGLE}:generateContent",
    {"contents": _CONTENTS},
    google_refusal,
    (f"{_GOOGLE}:streamGenerateContent?alt=sse", {"contents": _CONTENTS}),
)
GEMINI_ARRAY = RawCall(
    "gemini array",
    f"{_GOOGLE}:generateContent",
    {"contents": _CONTENTS},
    google_refusal,
    (f"{_GOOGLE}:streamGenerateContent", {"contents": _CONTENTS}),
)
COUNT = RawCall(
    "count_tokens",
    "/v1/messages/count_tokens",
    {"model": MODEL, "messages": _MESSAGES},
    anthropic_refusal,
)
GEMINI_COUNT = RawCall(
    "gemini count", f"{_GOOGLE}:countTokens", {"contents": _CONTENTS}, google_refusal
)
SAMPLED = [CHAT, COMPLETIONS, RESPONSES, CLAUDE, GEMINI, GEMINI_ARRAY]
READ = [CHAT, COMPLETIONS, RESPONSES, CLAUDE, GEMINI, COUNT, GEMINI_COUNT]
