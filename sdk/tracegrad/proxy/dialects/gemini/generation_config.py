"""`generationConfig` of a Gemini request in the engine's fields.

How long a model thinks is its own affair: a thinking budget has no effect but for 0, which turns
thinking off.
"""

from __future__ import annotations

from tracegrad.events import Json
from tracegrad.proxy.dialects.base import VisibleFields
from tracegrad.proxy.dialects.gemini.json_field import GeminiJsonField
from tracegrad.proxy.dialects.gemini.schema import json_schema

_NUMBERS = {
    "temperature": "temperature",
    "topP": "top_p",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
# The engine's name, and the least that makes sense.
_INTEGERS = {
    "topK": ("top_k", None),
    "maxOutputTokens": ("max_tokens", 1),
    "candidateCount": ("n", 1),
    "seed": ("seed", None),
}
_SERVED = (
    *_NUMBERS,
    *_INTEGERS,
    "stopSequences",
    "responseMimeType",
    "responseSchema",
    "responseJsonSchema",
    "_responseJsonSchema",
    "responseLogprobs",
    "logprobs",
    "responseModalities",
    "thinkingConfig",
)
_LEVELS = ("MINIMAL", "LOW", "MEDIUM", "HIGH", "XHIGH")
_UNSPECIFIED = "THINKING_LEVEL_UNSPECIFIED"


def read_config(config: GeminiJsonField | None) -> tuple[Json, VisibleFields]:
    """Canonical fields, and what the client asked to see. Thoughts are shown on request only."""
    if config is None:
        return {}, VisibleFields(reasoning=False)
    config.refuse_all_but(_SERVED)
    body: Json = {}
    for name, engine_name in _NUMBERS.items():
        if (field := config.get(name)) is not None:
            body[engine_name] = field.number()
    for name, (engine_name, least) in _INTEGERS.items():
        if (field := config.get(name)) is not None:
            body[engine_name] = field.integer(least)
    if (stops := config.get("stopSequences")) is not None and stops.texts():
        if "" in stops.texts():
            raise stops.error("has an empty string in it")
        body["stop"] = stops.texts()
    if (modalities := config.get("responseModalities")) is not None:
        for modality in modalities.items():
            modality.one_of(("TEXT", "MODALITY_UNSPECIFIED"))
    body.update(_format(config))
    logprobs = _logprobs(config, body)
    return body, VisibleFields(logprobs=logprobs, reasoning=_thinking(config, body))


def _logprobs(config: GeminiJsonField, body: Json) -> bool:
    asked = config.get("responseLogprobs")
    shown = asked is not None and asked.flag()
    if (most := config.get("logprobs")) is not None:
        if not shown:
            raise most.error("is set, but responseLogprobs is not true")
        body["top_logprobs"] = most.integer(0)
    return shown


def _thinking(config: GeminiJsonField, body: Json) -> bool:
    thinking = config.get("thinkingConfig")
    if thinking is None:
        return False
    thinking.refuse_all_but(("includeThoughts", "thinkingBudget", "thinkingLevel"))
    level = thinking.get("thinkingLevel")
    budget = thinking.get("thinkingBudget")
    if level is not None and level.value != _UNSPECIFIED:
        body["reasoning_effort"] = level.one_of((*_LEVELS, *map(str.lower, _LEVELS))).lower()
    elif budget is not None and budget.integer(-1) == 0:
        body["reasoning_effort"] = "none"
    shown = thinking.get("includeThoughts")
    return shown is not None and shown.flag()


def _format(config: GeminiJsonField) -> Json:
    mime = config.get("responseMimeType")
    kinds = ("text/plain", "application/json", "text/x.enum")
    kind = mime.one_of(kinds) if mime and mime.value else "text/plain"
    schema = config.get("responseSchema")
    plain = config.get("responseJsonSchema") or config.get("_responseJsonSchema")
    if schema is not None and plain is not None:
        raise plain.error("is set, and responseSchema too; leave one of them out")
    wanted = json_schema(schema) if schema else plain.object() if plain else None
    if kind == "application/json":
        if wanted is None:
            return {"response_format": {"type": "json_object"}}
        named = {"name": "response", "schema": wanted}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    given = schema or plain
    if kind == "text/x.enum":
        choices = (given or config.require("responseSchema")).require("enum").texts()
        return {"structured_outputs": {"choice": choices}}
    if given is not None:
        raise given.error("is set, but responseMimeType is not application/json")
    return {}
