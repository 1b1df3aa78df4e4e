"""OpenAI's text completions: a prompt of text or tokens, no messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tracegrad.chat.call import Call, VisibleFields
from tracegrad.chat.sampling_params import DEFAULTS
from tracegrad.proxy.dialects.body_checks import (
    BOOL,
    INTEGER,
    NUMBER,
    STRING,
    check_types,
    json_object,
)
from tracegrad.proxy.dialects.openai_chat import (
    OpenAIChatDialect,
    check_common,
    engine_body,
    wants_usage,
)
from tracegrad.proxy.http.errors import BadRequest

PATH = "/v1/completions"

FIELD_TYPES = {
    "model": STRING,
    "stream": BOOL,
    "echo": BOOL,
    "return_token_ids": BOOL,
    "n": INTEGER,
    "logprobs": INTEGER,
    **dict.fromkeys(DEFAULTS, NUMBER),
}


class OpenAICompletionsDialect(OpenAIChatDialect):
    """Answers and chunks go through as they are, like those of chat completions."""

    name = "completions"

    def parse(self, raw: bytes, path: Mapping[str, Any], query: Mapping[str, str]) -> Call:
        request = json_object(raw)
        _check_prompt(request.get("prompt"))
        check_types(request, FIELD_TYPES)
        check_common(request)
        return Call(
            dialect=self.name,
            request=request,
            body=engine_body(request),
            stream=bool(request.get("stream")),
            visible=VisibleFields(
                ids=bool(request.get("return_token_ids")),
                logprobs=request.get("logprobs") is not None,
                usage=wants_usage(request),
            ),
            path=PATH,
            # The engine then reports the prompt's tokens among those that it sampled.
            untrainable="echo" if request.get("echo") else None,
        )


def _check_prompt(prompt: object) -> None:
    """Text, token ids, or a list of either."""
    if isinstance(prompt, str) and prompt:
        return
    if isinstance(prompt, list) and prompt and (_is_ids(prompt) or all(map(_is_one, prompt))):
        return
    raise BadRequest(
        "prompt is not a text, a list of token ids, or a list of either", param="prompt"
    )


def _is_one(prompt: object) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and _is_ids(prompt))


def _is_ids(values: Sequence[object]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)
