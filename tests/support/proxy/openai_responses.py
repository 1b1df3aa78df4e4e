"""The Responses dialect without a proxy: answers and chunks in vLLM's shapes, events parsed with
OpenAI's own types, and OpenAI's client with the dialect behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from support.engines.engine_answers import Said, streamed, whole
from tracegrad.chat.call import Call
from tracegrad.proxy.dialects.openai_responses.request import OpenAIResponsesDialect

Json = dict[str, Any]

DIALECT = OpenAIResponsesDialect()
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    "strict": False,
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patches."}


def parse(request: Mapping[str, Any]) -> Call:
    return DIALECT.parse(json.dumps(request).encode(), {}, {})


def ask(**request: Any) -> Call:
    return parse({"model": "m", "input": "hi", **request})


def answer(one: Said, logprobs: Sequence[Json]) -> Json:
    """A whole `chat.completion` with log-probabilities."""
    body = whole(one)
    body["choices"][0]["logprobs"] = {"content": list(logprobs)}
    return body


def stream(call: Call, one: Said, size: int = 3) -> bytes:
    writer = DIALECT.writer(call)
    going_on, ending = streamed(one, size=size)
    return writer.begin(None) + b"".join(map(writer.chunk, going_on)) + writer.end(ending)


def events_of(body: bytes) -> list[Json]:
    """Each event's data; its name and its place in the sequence are as they should be."""
    events = []
    for number, event in enumerate(body.decode().split("\n\n")[:-1]):
        name, data = event.split("\n")
        read = json.loads(data.removeprefix("data: "))
        assert name == f"event: {read['type']}"
        assert read["sequence_number"] == number
        events.append(check_event(read))
    return events


def check_event(event: Json) -> Json:
    """Raises where the event has not all, or more than, OpenAI's types have."""
    read = EVENTS.validate_python(event)
    assert type(read).model_fields["type"].annotation.__args__ == (event["type"],)
    # OpenAI sends it although its types do not have it; see ResponseEvents.error.
    unknown = set(unknown_fields(read)) - ({"error"} if event["type"] == "error" else set())
    assert not unknown, unknown
    return event


def check_response(body: bytes | Json) -> Response:
    read = Response.model_validate(json.loads(body) if isinstance(body, bytes) else body)
    assert not list(unknown_fields(read))
    return read


def unknown_fields(value: Any, where: str = "") -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from (f"{where}{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from unknown_fields(getattr(value, name), f"{where}{name}.")
    elif isinstance(value, list):
        for item in value:
            yield from unknown_fields(item, where)
