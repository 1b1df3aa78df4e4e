"""Attributes with dotted names, `a.0.b`, as the trees that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tracegrad import genai_attributes
from tracegrad.events import Json, Span
from tracegrad.proxy.otel.semconv.chat_completion import parsed


def unflatten(attributes: Mapping[str, Any], prefix: str) -> Json:
    """What stands below `prefix`, by the parts of its name. A name that is both a value and the
    beginning of others keeps the others."""
    tree: Json = {}
    start = prefix + "."
    for name, value in attributes.items():
        if not name.startswith(start):
            continue
        *path, last = name[len(start) :].split(".")
        branch = tree
        for part in path:
            inner = branch.get(part)
            if not isinstance(inner, dict):
                inner = branch[part] = {}
            branch = inner
        if not isinstance(branch.get(last), dict):
            branch[last] = value
    return tree


def in_index_order(tree: Any) -> list[Json]:
    """The branches named by numbers, by their numbers; however far apart these are."""
    numbered = sorted(_numbered(tree), key=lambda pair: pair[0])
    return [branch for _, branch in numbered if isinstance(branch, dict)]


def _numbered(tree: Any) -> Iterator[tuple[int, Any]]:
    if isinstance(tree, Mapping):
        # `int` gives up on thousands of digits; nobody counts so far.
        names = (name for name in tree if name.isascii() and name.isdigit() and len(name) < 10)
        yield from ((int(name), tree[name]) for name in names)


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
        body = parsed(attributes.get(genai_attributes.EVENT_CONTENT, attributes.get("event_body")))
        if isinstance(body, Mapping):
            attributes = {**body, **attributes}
        yield SpanEvent(str(event.get("name")), attributes)
