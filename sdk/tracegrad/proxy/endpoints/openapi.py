"""The served OpenAPI document, with the routes that FastAPI does not know.

LLM calls, spans and health are bare ASGI routes. What they take and answer is written down
here, one line a route; a test holds the lines against the routes that the application has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import FastAPI

from tracegrad.events import Json
from tracegrad.protocol import METRICS_PATH, ROLLOUT_ID_PATTERN, TRACES_PATH
from tracegrad.proxy.endpoints.openapi_schemas import SCHEMAS, STRING, array_of, object_schema
from tracegrad.proxy.otel.otlp import PROTOBUF
from tracegrad.store import WriterLoad

_JSON = "application/json"
_EVENTS = "text/event-stream"

# What every whole answer of a kind has.
_CHOICES = object_schema("choices", choices=array_of({"type": "object"}))
_RESPONSE = object_schema(
    "id status output", id=STRING, status=STRING, output=array_of({"type": "object"})
)
_MESSAGE = object_schema("id content usage", id=STRING, content=array_of({"type": "object"}))
_CANDIDATES = object_schema(candidates=array_of({"type": "object"}))
_CHUNKS = {"anyOf": [_CANDIDATES, array_of(_CANDIDATES)]}
_DATA = object_schema("data", data=array_of({"type": "object"}))


def _number(name: str) -> Json:
    number: dict[str, Json] = {name: {"type": "integer"}}
    return object_schema(name, **number)


@dataclass(frozen=True, slots=True)
class _Operation:
    """`body` and `error` are names of schemas; `events`: it may be answered with a stream."""

    method: str
    path: str
    summary: str
    answer: Json
    body: str | None = None
    error: str = "OpenAIError"
    events: bool = False


def _gemini(version: str) -> list[_Operation]:
    path, model_error = f"/{version}/models/{{model}}", "GoogleError"
    generate = "GenerateContentRequest"
    return [
        _Operation("post", f"{path}:generateContent", "Gemini", _CANDIDATES, generate, model_error),
        _Operation(
            "post",
            f"{path}:streamGenerateContent",
            "Gemini, streamed: events with alt=sse, else one JSON array",
            _CHUNKS,
            generate,
            model_error,
            events=True,
        ),
        _Operation(
            "post",
            f"{path}:countTokens",
            "Tokens that a Gemini prompt would have",
            _number("totalTokens"),
            "CountTokensRequest",
            model_error,
        ),
    ]


_CALLS: Sequence[_Operation] = (
    _Operation(
        "post",
        "/v1/chat/completions",
        "OpenAI's chat completions",
        _CHOICES,
        "ChatCompletionRequest",
        events=True,
    ),
    _Operation(
        "post",
        "/v1/completions",
        "OpenAI's text completions",
        _CHOICES,
        "CompletionRequest",
        events=True,
    ),
    _Operation(
        "post", "/v1/responses", "OpenAI's responses", _RESPONSE, "ResponseRequest", events=True
    ),
    _Operation(
        "post",
        "/v1/messages",
        "Anthropic's messages",
        _MESSAGE,
        "MessageRequest",
        "AnthropicError",
        events=True,
    ),
    _Operation(
        "post",
        "/v1/messages/count_tokens",
        "Tokens that a message's prompt would have",
        _number("input_tokens"),
        "TokenCountRequest",
        "AnthropicError",
    ),
    _Operation("post", "/v1/embeddings", "The engine's embeddings", _DATA, "EmbeddingRequest"),
    _Operation("get", "/v1/models", "The engine's models, as the client reads them", {}),
    _Operation("get", "/v1/models/{model}", "One of them by its name", {}),
    _Operation(
        "get",
        "/v1beta/models",
        "The engine's models, as Google lists them",
        object_schema("models", models=array_of({"type": "object"})),
    ),
    *_gemini("v1beta"),
    *_gemini("v1"),
)


def extend_openapi(app: FastAPI) -> None:
    """From now on the application's OpenAPI document has all of its routes.

    To be called once, before the application is served.
    """
    own = app.openapi

    def openapi() -> Json:
        is_known = app.openapi_schema is not None
        document = own()
        if not is_known:
            _complete(document)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: Json) -> None:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(SCHEMAS)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)  # FastAPI's; errors have another shape here
    paths = document["paths"]
    for item in paths.values():
        for operation in item.values():
            operation["responses"].pop("422", None)
            operation["responses"].update(_errors("OpenAIError"))
    for call in _CALLS:
        paths.setdefault(call.path, {})[call.method] = _operation(call, "")
        paths.setdefault("/rollouts/{rollout}" + call.path, {})[call.method] = _operation(
            call, "rollout_"
        )
    paths[TRACES_PATH] = {"post": _spans()}
    paths["/healthz"] = {"get": _health()}
    paths[METRICS_PATH] = {"get": _metrics()}


def _operation(call: _Operation, prefix: str) -> Json:
    answers = {_JSON: {"schema": call.answer}}
    if call.events:
        answers[_EVENTS] = {"schema": {"type": "object"}}  # each event
    operation: Json = {
        "summary": call.summary,
        "operationId": prefix + _identifier(f"{call.method} {call.path}"),
        "tags": ["llm"],
        "parameters": _parameters(call.path, in_rollout=bool(prefix)),
        "responses": {
            "200": {"description": "What the engine answered", "content": answers},
            **_errors(call.error),
        },
    }
    if call.body is not None:
        schema = {"$ref": f"#/components/schemas/{call.body}"}
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return operation


def _identifier(text: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in text)


def _parameters(path: str, *, in_rollout: bool) -> list[Json]:
    parameters: list[Json] = []
    if in_rollout:
        rollout = {"type": "string", "pattern": ROLLOUT_ID_PATTERN}
        parameters.append({"name": "rollout", "in": "path", "required": True, "schema": rollout})
    if "{model}" in path:
        model = {"type": "string", "minLength": 1}
        parameters.append({"name": "model", "in": "path", "required": True, "schema": model})
    if path.endswith(":streamGenerateContent"):
        alt = {"type": "string", "enum": ["json", "sse"]}
        parameters.append({"name": "alt", "in": "query", "schema": alt})
    return parameters


def _errors(name: str) -> Json:
    content = {_JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {
        "4XX": {"description": "The request is wrong; it says how", "content": content},
        "5XX": {"description": "The engine or the store is at fault", "content": content},
    }


def _spans() -> Json:
    body: Json = {
        PROTOBUF: {"schema": {"type": "string", "format": "binary"}},
        _JSON: {"schema": {"type": "object"}},
    }
    return {
        "summary": "OpenTelemetry spans (OTLP over HTTP), ours or of other libraries",
        "operationId": "post_v1_traces",
        "requestBody": {"required": True, "content": body},
        "responses": {
            "200": {"description": "Stored", "content": body},
            **_errors("OpenAIError"),
        },
    }


def _health() -> Json:
    number: Json = {"type": "integer"}
    load = object_schema(" ".join(WriterLoad._fields), **dict.fromkeys(WriterLoad._fields, number))
    state = object_schema("status version writer", status=STRING, version=number, writer=load)
    return {
        "summary": "Whether the proxy serves",
        "operationId": "get_healthz",
        "responses": {"200": {"description": "It does", "content": {_JSON: {"schema": state}}}},
    }


def _metrics() -> Json:
    text = {"text/plain": {"schema": STRING}}
    return {
        "summary": "Counts of all workers, in Prometheus's text format",
        "operationId": "get_metrics",
        "responses": {"200": {"description": "As they are", "content": text}},
    }
