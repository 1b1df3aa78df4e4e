"""The engine's models, in the shape of the client that asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import orjson

from tracegrad.proxy.errors import ApiError
from tracegrad.records import Json


def models(raw: bytes, headers: Mapping[str, str]) -> bytes:
    """As the engine lists them; Anthropic's and Google's clients, known by their headers, get
    the shape that they read."""
    if "x-goog-api-key" in headers:
        return gemini_models(raw, headers)
    return _anthropic_models(raw) if "anthropic-version" in headers else raw


def gemini_models(raw: bytes, headers: Mapping[str, str]) -> bytes:
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    listed = [
        {
            "name": f"models/{model['id']}",
            "displayName": model["id"],
            "inputTokenLimit": model.get("max_model_len"),
            "supportedGenerationMethods": methods,
        }
        for model in _listed(raw)
    ]
    return orjson.dumps({"models": listed})


def _anthropic_models(raw: bytes) -> bytes:
    listed = _listed(raw)
    ids = [model["id"] for model in listed]
    data = [
        {
            "type": "model",
            "id": model["id"],
            "display_name": model["id"],
            "lifecycle": "active",
            "max_input_tokens": model.get("max_model_len"),
            "created_at": datetime.fromtimestamp(model.get("created") or 0, UTC).isoformat(),
        }
        for model in listed
    ]
    return orjson.dumps(
        {
            "data": data,
            "has_more": False,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
        }
    )


def _listed(raw: bytes) -> Sequence[Json]:
    try:
        return [model for model in orjson.loads(raw)["data"] if isinstance(model["id"], str)]
    except (ValueError, KeyError, TypeError) as error:
        raise ApiError(
            502, "the engine's list of models cannot be read", kind="upstream_error"
        ) from error
