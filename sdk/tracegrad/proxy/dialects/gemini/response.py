"""What Google's clients read: responses with candidates, usage, log-probabilities, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from tracegrad.chat.call import Call
from tracegrad.events import Json
from tracegrad.proxy.dialects import tool_arguments
from tracegrad.proxy.http.errors import ApiError

_FINISH_REASONS = {
    "stop": "STOP",
    "tool_calls": "STOP",
    "length": "MAX_TOKENS",
    "content_filter": "SAFETY",
}
# google.rpc.Code names.
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
    529: "UNAVAILABLE",
}


def whole_response(call: Call, answer: Json) -> bytes:
    candidates = []
    for choice in answer["choices"]:
        message = choice["message"]
        parts = text_parts(call, message) + [
            function_call(tool["id"], tool["function"]) for tool in message.get("tool_calls") or ()
        ]
        candidates.append(candidate(choice, parts))
    return orjson.dumps(response(call, candidates, answer.get("usage")))


def response(call: Call, candidates: Sequence[Json], usage: Any = None) -> Json:
    body: Json = {"candidates": list(candidates)} if candidates else {}
    if usage:
        body["usageMetadata"] = _usage(usage)
    # Under the name that the client gave the model.
    return {**body, "modelVersion": call.body["model"], "responseId": call.turn_id}


def candidate(choice: Json, parts: Sequence[Json]) -> Json:
    """One choice of an answer or of a chunk, which has these parts."""
    candidate: Json = {
        "content": {"role": "model", "parts": list(parts)},
        "index": choice.get("index") or 0,
    }
    if (finish := choice.get("finish_reason")) is not None:
        candidate["finishReason"] = _FINISH_REASONS.get(finish, "OTHER")
    if entries := (choice.get("logprobs") or {}).get("content"):
        candidate["logprobsResult"] = {
            "chosenCandidates": [_logprob(entry) for entry in entries],
            "topCandidates": [
                {"candidates": [_logprob(other) for other in entry.get("top_logprobs") or ()]}
                for entry in entries
            ],
        }
        candidate["avgLogprobs"] = sum(entry["logprob"] for entry in entries) / len(entries)
    return candidate


def text_parts(call: Call, message: Json) -> list[Json]:
    """The parts of a message or delta that are text."""
    parts: list[Json] = []
    if call.visible.reasoning and (thought := message.get("reasoning")):
        parts.append({"text": thought, "thought": True})
    if text := message.get("content"):
        parts.append({"text": text})
    return parts


def function_call(call_id: str, function: Json) -> Json:
    arguments = function.get("arguments") or ""
    return {
        "functionCall": {
            "id": call_id,
            "name": function["name"],
            "args": tool_arguments.as_object(arguments),
        }
    }


def error_body(error: ApiError) -> bytes:
    status = _STATUSES.get(error.status)
    if status is None:
        status = "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL"
    details: Json = {"code": error.status, "message": error.message, "status": status}
    if error.param is not None:
        details["details"] = [
            {
                "@type": "type.googleapis.com/google.rpc.BadRequest",
                "fieldViolations": [{"field": error.param, "description": error.message}],
            }
        ]
    return orjson.dumps({"error": details})


def _usage(usage: Json) -> Json:
    prompt, completion = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    thoughts = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    counts = {
        "promptTokenCount": prompt,
        "candidatesTokenCount": completion - thoughts,
        "totalTokenCount": prompt + completion,
    }
    if thoughts:
        counts["thoughtsTokenCount"] = thoughts
    if cached:
        counts["cachedContentTokenCount"] = cached
    return counts


def _logprob(entry: Json) -> Json:
    return {"token": entry.get("token"), "logProbability": entry["logprob"]}
