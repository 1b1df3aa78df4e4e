"""Spans as OTLP's JSON has them, and those of an agent by OpenTelemetry's conventions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

Json = dict[str, Any]

TRACE = "0af7651916cd43dd8448eb211c80319c"
T0 = 1_700_000_000_000_000_000  # ns


def value(reported: Any) -> Json:
    if isinstance(reported, bool):
        return {"boolValue": reported}
    if isinstance(reported, int):
        return {"intValue": str(reported)}
    if isinstance(reported, float):
        return {"doubleValue": reported}
    if isinstance(reported, list):
        return {"arrayValue": {"values": [value(each) for each in reported]}}
    return {"stringValue": str(reported)}


def pairs(attributes: Mapping[str, Any]) -> list[Json]:
    return [{"key": key, "value": value(reported)} for key, reported in attributes.items()]


def span_id(number: int) -> str:
    return f"{number:016x}"


def span(
    number: int,
    name: str,
    attributes: Mapping[str, Any] | None = None,
    *,
    parent: int | None = None,
    trace: str = TRACE,
    at: tuple[float, float] | None = None,
    error: str | None = None,
    events: Sequence[tuple[str, Mapping[str, Any]]] = (),
) -> Json:
    """`at`: seconds after T0; by default spans of higher numbers lie within those of lower."""
    begin, end = at or (number, 100 - number)
    made: Json = {
        "traceId": trace,
        "spanId": span_id(number),
        "name": name,
        "kind": 1,
        "startTimeUnixNano": str(T0 + int(begin * 1e9)),
        "endTimeUnixNano": str(T0 + int(end * 1e9)),
        "attributes": pairs(attributes or {}),
    }
    if parent is not None:
        made["parentSpanId"] = span_id(parent)
    if error is not None:
        made["status"] = {"code": 2, "message": error}
    if events:
        made["events"] = [
            {"name": each, "timeUnixNano": str(T0), "attributes": pairs(reported)}
            for each, reported in events
        ]
    return made


def export(spans: Sequence[Json], resource: Mapping[str, Any] | None = None) -> Json:
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": pairs(resource or {})},
                "scopeSpans": [{"scope": {"name": "tests"}, "spans": list(spans)}],
            }
        ]
    }


AGENT = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "planner"}
TOOL = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather"}
# What is said in turns, by the user and the model.
TEXT = [("user", "Rain?"), ("assistant", "Where?"), ("user", "In Ulm."), ("assistant", "Yes.")]


def said(texts: Sequence[tuple[str, str]]) -> str:
    return json.dumps(
        [{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in texts]
    )


def chat(heard: int, **more: Any) -> Json:
    """Attributes of the call that heard so many of the texts and said the next."""
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.input.messages": said(TEXT[:heard]),
        "gen_ai.output.messages": said(TEXT[heard : heard + 1]),
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 1,
        **more,
    }


def send(http: httpx.Client, *spans: Json, **resource: Any) -> None:
    answer = http.post("/v1/traces", json=export(spans, resource))
    assert (answer.status_code, answer.json()) == (200, {})
