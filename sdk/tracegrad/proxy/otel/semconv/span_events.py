"""Events of a span. The store keeps them, as everything of a span, among its attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tracegrad.events import Json, Span
from tracegrad.proxy.otel.semconv.chat_completion import parsed

# OpenTelemetry's own names for what formats without a place of its own write into attributes;
# for events it has none.
STATUS_MESSAGE = "otel.status_description"
EVENTS = "otel.events"


class SpanEvent(NamedTuple):
    name: str
    attributes: Json


def as_attribute(name: str, time_ns: int, attributes: Mapping[str, Any]) -> Json:
    """An event as it is kept."""
    return {"name": name, "time_ns": time_ns, "attributes": dict(attributes)}


def events_of(span: Span) -> Iterator[SpanEvent]:
    """In order. An event's body, which some libraries write as JSON into one attribute, stands
    beside its other attributes."""
    kept = span.attributes.get(EVENTS)
    for event in kept if isinstance(kept, Sequence) and not isinstance(kept, str) else ():
        if not isinstance(event, Mapping) or not isinstance(event.get("attributes"), Mapping):
            continue
        attributes = dict(event["attributes"])
        body = parsed(attributes.get("gen_ai.event.content", attributes.get("event_body")))
        if isinstance(body, Mapping):
            attributes = {**body, **attributes}
        yield SpanEvent(str(event.get("name")), attributes)
