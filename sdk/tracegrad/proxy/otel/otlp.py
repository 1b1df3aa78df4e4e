"""OTLP over HTTP: spans as protobuf or as JSON, plain or compressed, into records."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from google.protobuf.json_format import ParseDict, ParseError  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tracegrad.events import Json, Span
from tracegrad.protocol import ROLLOUT_ATTRIBUTE
from tracegrad.proxy.auth.rollout_attribution import is_rollout_id
from tracegrad.proxy.http.errors import BadRequest
from tracegrad.proxy.http.request_body import parsed_size, too_many_values
from tracegrad.proxy.otel.otlp_size import fields_in
from tracegrad.proxy.otel.semconv.flat_attributes import EVENTS, STATUS_MESSAGE, as_attribute

SERVICE = "service.name"
PROTOBUF = "application/x-protobuf"
JSON = "application/json"

_KINDS = {PROTOBUF: PROTOBUF, "application/protobuf": PROTOBUF, JSON: JSON}
_STATUS = {Status.STATUS_CODE_OK: "ok", Status.STATUS_CODE_ERROR: "error"}
# How zlib reads each encoding: gzip with its header, deflate as zlib's own format.
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
# Bytes of protobuf up to which fields are not counted, and how many times its size a protobuf takes
# at most in memory: an empty attribute has two bytes.
_SMALL = 64 << 10
_SMALL_TIMES = 40
# Bytes that a field takes: as protobuf's, and as Python's.
_FIELD_BYTES = 400
_IDS = ("traceId", "spanId", "parentSpanId")
_LAST_NS = 2**63


@dataclass(frozen=True, slots=True)
class OtlpExport:
    """`rejected` spans cannot be kept, `problem` says why, of the first that had one."""

    spans: list[Span]
    rejected: int = 0
    problem: str = ""


def encoding_of(content_type: str) -> str:
    """The encoding that a request has and its answer gets. Raises BadRequest (415)."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in _KINDS:
        raise BadRequest(
            f"content-type {kind or 'missing'}: send spans as {PROTOBUF} or {JSON} "
            "(OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf)",
            param="content-type",
            status=415,
        )
    return _KINDS[kind]


def export_memory(data: bytes, kind: str, most_values: int) -> int:
    """Bytes that an export takes when it is read, beside its own. Raises BadRequest (413) for one
    of too many values."""
    if kind == JSON:
        return parsed_size(data, most_values)
    if len(data) <= _SMALL:
        return _SMALL_TIMES * len(data)
    try:
        fields = fields_in(data, most_values)
    except DecodeError as error:
        raise invalid_export(error) from None
    if fields > most_values:
        raise too_many_values(most_values)
    return fields * _FIELD_BYTES


def read_export(data: bytes, kind: str, most_spans: int) -> OtlpExport:
    """Raises BadRequest for what is no OTLP export."""
    try:
        request = _from_json(data) if kind == JSON else ExportTraceServiceRequest.FromString(data)
    except (DecodeError, ParseError) as error:
        raise invalid_export(error) from None
    spans: list[Span] = []
    problems: list[str] = []
    rejected = 0
    for resource in request.resource_spans:
        shared = attributes(resource.resource.attributes)
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            if len(spans) == most_spans:
                rejected += 1
                problems.append(f"more than {most_spans} spans (max_spans): export fewer at a time")
                continue
            if (wrong := _wrong(span)) is not None:
                rejected += 1
                problems.append(f"span {span.name[:100]!r}: {wrong}")
                continue
            spans.append(_span(span, shared, problems))
    return OtlpExport(spans, rejected, problems[0] if problems else "")


def export_response(export: OtlpExport, kind: str) -> bytes:
    """Says what was not taken, in the encoding of the request."""
    if kind == JSON:
        partial = {"rejectedSpans": str(export.rejected), "errorMessage": export.problem}
        return orjson.dumps({"partialSuccess": partial} if export.problem else {})
    message = ExportTraceServiceResponse()
    if export.problem:
        message.partial_success.rejected_spans = export.rejected
        message.partial_success.error_message = export.problem
    encoded: bytes = message.SerializeToString()
    return encoded


def attributes(pairs: Iterable[Any]) -> Json:
    """OTLP's `KeyValue` messages as a dictionary of JSON values."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _from_json(data: bytes) -> Any:
    """Protobuf's own JSON, but for ids: OTLP has them in hexadecimal digits."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ParseError(str(error)) from None
    if not isinstance(body, dict):
        raise ParseError("it is no JSON object")
    for span in _spans_in(body):
        for holder in (span, *_objects(span.get("links"))):
            for name in _IDS:
                if name in holder:
                    holder[name] = _id(holder[name])
    try:
        return ParseDict(body, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    except (TypeError, ValueError, AttributeError) as error:
        # What protobuf's own reader does not foresee.
        raise ParseError(str(error)) from None


def _spans_in(body: Json) -> Iterable[Json]:
    for resource in _objects(body.get("resourceSpans")):
        for scope in _objects(resource.get("scopeSpans")):
            yield from _objects(scope.get("spans"))


def _objects(value: object) -> list[Json]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _id(value: object) -> str:
    """Hexadecimal digits as protobuf's JSON has bytes; empty for what are none."""
    try:
        return base64.b64encode(bytes.fromhex(value if isinstance(value, str) else "")).decode()
    except ValueError:
        return ""


class Decompressor:
    """A packed body piece by piece, so that each may be paid for before there is another."""

    def __init__(self, raw: bytes, encoding: str) -> None:
        """Raises BadRequest (415) for an encoding that is not known."""
        bits = _WINDOW_BITS.get(encoding)
        if bits is None:
            raise BadRequest(
                f"content-encoding {encoding[:40]}: use gzip, deflate or none",
                param="content-encoding",
                status=415,
            )
        self._unpacker = zlib.decompressobj(wbits=bits)
        self._rest = raw

    def read(self, most: int) -> bytes:
        """At most so many bytes; empty at the end. Raises BadRequest."""
        if self._unpacker.eof:
            if self._unpacker.unused_data:
                raise BadRequest("something follows the end of the compressed body")
            return b""
        try:
            data = self._unpacker.decompress(self._rest, most)
        except zlib.error as error:
            raise invalid_export(error) from None
        self._rest = self._unpacker.unconsumed_tail
        if not data and not self._unpacker.eof:
            raise BadRequest("the compressed body has no end")
        return data


def invalid_export(error: Exception) -> BadRequest:
    return BadRequest(f"the body is not an OTLP export: {error}")


def _wrong(span: OtlpSpan) -> str | None:
    """Why the span cannot be kept; None where it can."""
    if len(span.trace_id) != 16 or not any(span.trace_id):
        return "traceId is not 16 bytes (32 hexadecimal digits) other than zero"
    if len(span.span_id) != 8 or not any(span.span_id):
        return "spanId is not 8 bytes (16 hexadecimal digits) other than zero"
    if max(span.start_time_unix_nano, span.end_time_unix_nano) >= _LAST_NS:
        return "its times are beyond the year 2262"
    return None


def _span(span: OtlpSpan, shared: Mapping[str, Any], problems: list[str]) -> Span:
    """`shared` are the attributes of its resource; `problems` gets what is wrong with it."""
    own = attributes(span.attributes)
    named = own.get(ROLLOUT_ATTRIBUTE) or shared.get(ROLLOUT_ATTRIBUTE)
    rollout_id = str(named) if named else None
    if rollout_id is not None and not is_rollout_id(rollout_id):
        problems.append(
            f"span {span.name[:100]!r}: {ROLLOUT_ATTRIBUTE} {rollout_id[:40]!r} is no rollout id: "
            "use at most 128 letters, digits and . _ : @ -"
        )
        rollout_id = None
    parent = span.parent_span_id
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=parent.hex() if len(parent) == 8 and any(parent) else None,
        rollout_id=rollout_id,
        name=span.name,
        kind=_kind(span.kind),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=_STATUS.get(span.status.code, "unset"),
        attributes=own | _beside(span, shared),
    )


def _kind(kind: int) -> str:
    known = kind in OtlpSpan.SpanKind.values()
    return (
        OtlpSpan.SpanKind.Name(kind).removeprefix("SPAN_KIND_").lower() if known else "unspecified"
    )


def _beside(span: OtlpSpan, shared: Mapping[str, Any]) -> Json:
    """What a span has beside its attributes, as attributes."""
    found: Json = {}
    service = shared.get(SERVICE)
    if service and not str(service).startswith("unknown_service"):
        found[SERVICE] = service
    if span.status.message:
        found[STATUS_MESSAGE] = span.status.message
    if span.events:
        found[EVENTS] = [
            as_attribute(event.name, event.time_unix_nano, attributes(event.attributes))
            for event in span.events
        ]
    return found


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return attributes(value.kvlist_value.values)
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    if kind == "double_value" and not math.isfinite(value.double_value):
        return str(value.double_value)  # JSON has no such numbers
    return getattr(value, kind) if kind else None
