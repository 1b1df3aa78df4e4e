"""The engine's models, in the shape of the client that asks: all of them, or one by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from tracegrad.events import Json
from tracegrad.proxy.http.errors import ApiError, UpstreamError

_METHODS = ["generateContent", "streamGenerateContent", "countTokens"]


def models_response(raw: bytes, headers: Mapping[str, str], path: Mapping[str, Any]) -> bytes:
    """`raw`: the engine's list. Anthropic's and Google's clients, known by their headers, get the
    shape that they read. Raises ApiError: 404 for a model that is not there."""
    if "x-goog-api-key" in headers:
        return gemini_models_response(raw, headers, path)
    if "anthropic-version" in headers:
        return _shaped(raw, path, _anthropic, _anthropic_list)
    return _shaped(raw, path, lambda model: model, None)


def gemini_models_response(
    raw: bytes, headers: Mapping[str, str], path: Mapping[str, Any]
) -> bytes:
    return _shaped(raw, path, _gemini, lambda listed: {"models": listed})


def _shaped(
    raw: bytes,
    path: Mapping[str, Any],
    one: Callable[[Json], Json],
    every: Callable[[list[Json]], Json] | None,
) -> bytes:
    """`every` puts the models together; None: as the engine did."""
    name = path.get("model")
    if name is None and every is None:
        return raw
    listed = _listed(raw)
    if name is not None:
        listed = [model for model in listed if model["id"] == name]
        if not listed:
            raise ApiError(
                404,
                f"the engine has no model {str(name)[:80]!r}; GET /v1/models lists its models",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )
        return orjson.dumps(one(listed[0]))
    assert every is not None
    return orjson.dumps(every([one(model) for model in listed]))


def _gemini(model: Json) -> Json:
    return {
        "name": f"models/{model['id']}",
        "displayName": model["id"],
        "inputTokenLimit": model.get("max_model_len"),
        "supportedGenerationMethods": _METHODS,
    }


def _anthropic(model: Json) -> Json:
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "lifecycle": "active",
        "max_input_tokens": model.get("max_model_len"),
        "created_at": datetime.fromtimestamp(model.get("created") or 0, UTC).isoformat(),
    }


def _anthropic_list(listed: list[Json]) -> Json:
    ids = [model["id"] for model in listed]
    return {
        "data": listed,
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }


def _listed(raw: bytes) -> list[Json]:
    try:
        return [model for model in orjson.loads(raw)["data"] if isinstance(model["id"], str)]
    except (ValueError, KeyError, TypeError) as error:
        raise UpstreamError("the engine's list of models cannot be read") from error
