"""OpenTelemetry spans over HTTP: `POST /v1/traces`, protobuf, plain or compressed."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tracegrad.proxy.access import caller_of, owned
from tracegrad.proxy.attribution import TraceMap
from tracegrad.proxy.connection import ClientGone, headers_of, read_body
from tracegrad.proxy.errors import ApiError, BadRequest
from tracegrad.proxy.recorder import Recorder
from tracegrad.records import Json, SpanEnded

ROLLOUT_ATTRIBUTE = "tracegrad.rollout"
PROTOBUF = "application/x-protobuf"

_EMPTY_ANSWER = ExportTraceServiceResponse().SerializeToString()
_STATUS = {Status.STATUS_CODE_OK: "ok", Status.STATUS_CODE_ERROR: "error"}
# How zlib reads each encoding: gzip with its header, deflate as zlib's own format.
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class Traces:
    def __init__(self, recorder: Recorder, traces: TraceMap, *, max_body_bytes: int) -> None:
        self._recorder = recorder
        self._traces = traces
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        try:
            _check_type(headers.get("content-type", ""))
            raw = await read_body(receive, self._max_body_bytes)
            encoding = headers.get("content-encoding", "identity")
            spans = await asyncio.to_thread(read_spans, raw, encoding, self._max_body_bytes)
            await self._recorder.commit(with_rollouts(owned(spans, caller_of(scope)), self._traces))
            response = Response(_EMPTY_ANSWER, media_type=PROTOBUF)
        except ApiError as error:
            response = error.response()
        except ClientGone:
            return
        await response(scope, receive, send)


def read_spans(raw: bytes, encoding: str, limit: int) -> list[SpanEnded]:
    """The spans of an OTLP export. Raises BadRequest for what is none, or too large unpacked."""
    try:
        request = ExportTraceServiceRequest.FromString(_unpacked(raw, encoding, limit))
    except (DecodeError, zlib.error) as error:
        raise BadRequest(f"the body is not an OTLP export: {error}") from None
    return [
        _span(span, resource_rollout)
        for resource in request.resource_spans
        for resource_rollout in [attributes(resource.resource.attributes).get(ROLLOUT_ATTRIBUTE)]
        for scope in resource.scope_spans
        for span in scope.spans
        if len(span.trace_id) == 16 and len(span.span_id) == 8
    ]


def with_rollouts(spans: Sequence[SpanEnded], traces: TraceMap) -> list[SpanEnded]:
    """Spans that name no rollout get that of their trace, where it is known."""
    for span in spans:
        traces.learn(span.trace_id, span.rollout_id)
    return [
        span if span.rollout_id is not None else _moved(span, traces.rollout_of(span.trace_id))
        for span in spans
    ]


def attributes(pairs: Iterable[Any]) -> Json:
    """OTLP's `KeyValue` messages as a dictionary of JSON values."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _check_type(content_type: str) -> None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in (PROTOBUF, "application/protobuf"):
        raise BadRequest(
            f"content-type {kind or 'missing'}: send spans as {PROTOBUF} "
            "(OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf)",
            param="content-type",
            status=415,
        )


def _unpacked(raw: bytes, encoding: str, limit: int) -> bytes:
    if encoding == "identity":
        return raw
    bits = _WINDOW_BITS.get(encoding)
    if bits is None:
        raise BadRequest(
            f"content-encoding {encoding}: use gzip or none", param="content-encoding", status=415
        )
    unpacker = zlib.decompressobj(wbits=bits)
    data = unpacker.decompress(raw, limit)
    if unpacker.unconsumed_tail:
        raise BadRequest(f"the body unpacks to more than {limit >> 20} MiB", status=413)
    if not unpacker.eof:
        raise BadRequest("the compressed body has no end")
    return data


def _span(span: Span, resource_rollout: object) -> SpanEnded:
    own = attributes(span.attributes)
    rollout = own.get(ROLLOUT_ATTRIBUTE) or resource_rollout
    return SpanEnded(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex() or None,
        rollout_id=str(rollout) if rollout else None,
        name=span.name,
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=_STATUS.get(span.status.code, "unset"),
        attributes=own,
    )


def _moved(span: SpanEnded, rollout_id: str | None) -> SpanEnded:
    return span if rollout_id is None else dataclasses.replace(span, rollout_id=rollout_id)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return attributes(value.kvlist_value.values)
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    return getattr(value, kind) if kind else None
