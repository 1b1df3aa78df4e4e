"""Google's Gemini API: requests into canonical calls (Gemini CLI speaks it and nothing else).

Field names are those of the `google-genai` package, 3.4. Unknown ones are refused, as the vendor
does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from tracegrad.chat.content_parts import media_untrainable_reason
from tracegrad.events import Json
from tracegrad.proxy.dialects.base import Call, VisibleFields
from tracegrad.proxy.dialects.body_checks import json_object
from tracegrad.proxy.dialects.gemini import response as output
from tracegrad.proxy.dialects.gemini.contents import messages_of, refuse_open_end, system_of
from tracegrad.proxy.dialects.gemini.generation_config import read_config
from tracegrad.proxy.dialects.gemini.json_field import GeminiJsonField
from tracegrad.proxy.dialects.gemini.stream import GeminiStreamWriter
from tracegrad.proxy.dialects.gemini.tools import read_choice, read_tools
from tracegrad.proxy.http.errors import ApiError, BadRequest

NAME = "gemini"
STREAMED = "streamGenerateContent"
WHOLE = "generateContent"

# vLLM's own fields of chat completions, which it judges itself.
_VLLMS = {
    "chatTemplateKwargs": "chat_template_kwargs",
    "structuredOutputs": "structured_outputs",
    "vllmXargs": "vllm_xargs",
}

_SERVED = frozenset(
    (
        *_VLLMS,
        "contents",
        "systemInstruction",
        "tools",
        "toolConfig",
        "generationConfig",
        # The model is in the path; the others concern accounts, storage and filters at the
        # vendor: no effect.
        "model",
        "labels",
        "safetySettings",
        "serviceTier",
        "store",
    )
)
_REFUSED = {
    "cachedContent": "nothing is cached by name here; send the contents",
    "modelArmorConfig": "there is no such filter here",
}


@dataclass(frozen=True, slots=True)
class GeminiCall(Call):
    sse: bool = True  # a stream of server-sent events; else one JSON array, element by element


class GeminiDialect:
    """`path` has `model` and `method`, from `/v1beta/models/{model}:{method}`."""

    name = NAME

    def parse(self, raw: bytes, path: Mapping[str, Any], query: Mapping[str, str]) -> GeminiCall:
        method = path["method"]
        if method not in (STREAMED, WHOLE):
            raise BadRequest(f"the method {method!r} is not served", param="method", status=404)
        alt = query.get("alt") or query.get("$alt") or "json"
        if alt not in ("json", "sse"):
            raise BadRequest(f"alt is {alt!r}; served are json and sse", param="alt")
        request = json_object(raw)
        given = GeminiJsonField(request)
        body = _conversation(given, path["model"])
        refuse_open_end(given.require("contents"))
        settings, shown = read_config(given.get("generationConfig"))
        return _call(request, body | settings, shown, stream=method == STREAMED, sse=alt == "sse")

    def answer(self, call: Call, answer: Json) -> bytes:
        return output.whole_response(call, answer)

    def writer(self, call: Call) -> GeminiStreamWriter:
        return GeminiStreamWriter(call, array=isinstance(call, GeminiCall) and not call.sse)

    def error(self, error: ApiError) -> bytes:
        return output.error_body(error)


def count_request(raw: bytes, path: Mapping[str, Any]) -> Call:
    """`:countTokens`: a call that is only to be rendered and counted.

    The body is one of contents alone, or has a whole request under `generateContentRequest`.
    Raises BadRequest.
    """
    request = json_object(raw)
    given = GeminiJsonField(request)
    inner = given.get("generateContentRequest")
    if inner is not None:
        given.refuse_all_but(("generateContentRequest",))
        given = inner
    body = _conversation(given, path["model"])
    settings, shown = read_config(given.get("generationConfig"))
    return _call(request, body | settings, shown, stream=False, sse=False)


def count_answer(tokens: int) -> bytes:
    return orjson.dumps({"totalTokens": tokens})


def _call(
    request: Json, body: Json, shown: VisibleFields, *, stream: bool, sse: bool
) -> GeminiCall:
    return GeminiCall(
        dialect=NAME,
        request=request,
        body=body,
        stream=stream,
        visible=shown,
        untrainable=media_untrainable_reason(body["messages"]),
        sse=sse,
    )


def _conversation(given: GeminiJsonField, model: str) -> Json:
    """What the prompt is made of."""
    given.refuse_all_but(_SERVED, _REFUSED)
    tools = read_tools(given.get("tools"))
    body: Json = {
        "model": model.removeprefix("models/"),
        "messages": [
            *system_of(given.get("systemInstruction")),
            *messages_of(given.require("contents")),
        ],
    }
    if tools:
        body["tools"] = tools
    for name, its_own in _VLLMS.items():
        if (field := given.get(name)) is not None:
            body[its_own] = field.value
    return body | read_choice(given.get("toolConfig"), tools)
