"""Spans to a server that takes OTLP over HTTP, as protobuf."""

from __future__ import annotations

import gzip
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from http.client import HTTPException

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import ReadableSpan

from tracegrad.protocol import TRACES_PATH
from tracegrad.proxy.otel.otlp import PROTOBUF

_TIMEOUT_S = 60.0
# Of one request, before it is packed; a span is never split.
_BATCH_BYTES = 2 << 20


class NotSent(Exception):
    """One line: the address, and what it answered."""


def traces_url(url: str) -> str:
    """An address without the path of traces gets it, as OTEL_EXPORTER_OTLP_ENDPOINT does."""
    url = url.rstrip("/")
    return url if url.endswith(TRACES_PATH) else url + TRACES_PATH


def send_spans(url: str, headers: Mapping[str, str], spans: Iterable[ReadableSpan]) -> int:
    """How many were taken. Raises NotSent."""
    taken = 0
    for batch in _batches(spans):
        taken += len(batch) - _post(url, headers, encode_spans(batch).SerializeToString())
    return taken


def _batches(spans: Iterable[ReadableSpan]) -> Iterator[list[ReadableSpan]]:
    batch: list[ReadableSpan] = []
    size = 0
    for span in spans:
        bytes_of = encode_spans([span]).ByteSize()
        if batch and size + bytes_of > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(span)
        size += bytes_of
    if batch:
        yield batch


def _post(url: str, headers: Mapping[str, str], body: bytes) -> int:
    """How many spans the server would not take."""
    sent = {"content-type": PROTOBUF, "content-encoding": "gzip", **headers}
    try:
        request = urllib.request.Request(url, gzip.compress(body, 1), sent, method="POST")
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return _rejected(answer.read())
    except urllib.error.HTTPError as error:
        said = " ".join(error.read(500).decode(errors="replace").split())
        raise NotSent(f"{url}: {error.code} {error.reason}: {said}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise NotSent(f"{url}: {reason}") from None


def _rejected(body: bytes) -> int:
    try:
        answer = ExportTraceServiceResponse.FromString(body)
    except DecodeError:  # some answer in JSON, and say nothing there
        return 0
    return int(answer.partial_success.rejected_spans)
