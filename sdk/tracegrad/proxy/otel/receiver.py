"""OpenTelemetry spans over HTTP: `POST /v1/traces`, ours and those of other libraries."""

from __future__ import annotations

from dataclasses import dataclass, replace

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tracegrad.proxy.auth.middleware import Caller, caller_of, restrict_to_rollout
from tracegrad.proxy.http.errors import ApiError, BadRequest
from tracegrad.proxy.http.request import ClientDisconnected, headers_of, read_body
from tracegrad.proxy.http.request_body import LARGE_BODY_BYTES, MemoryLease, WorkerThreads, lease_of
from tracegrad.proxy.otel.ingest import SpanIngest
from tracegrad.proxy.otel.llm_span import ReportedSpan, read_span, without_evaluations
from tracegrad.proxy.otel.otlp import (
    Decompressor,
    OtlpExport,
    encoding_of,
    export_memory,
    export_response,
    read_export,
)

# Bytes that are unpacked at a time.
_PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class ExportLimits:
    """Of one export: `body` in bytes, unpacked; `values` of JSON or fields; `spans` kept."""

    body: int
    values: int
    spans: int


class OtlpReceiver:
    def __init__(self, ingest: SpanIngest, limits: ExportLimits, workers: WorkerThreads) -> None:
        self._ingest = ingest
        self._limits = limits
        self._workers = workers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        try:
            kind = encoding_of(headers.get("content-type", ""))
            encoding = headers.get("content-encoding", "identity")
            data = await read_body(receive)
            lease = lease_of(scope)
            if encoding != "identity":
                data = await self._unpacked(data, encoding, lease)
            run, size = self._workers.run, len(data)
            await lease.acquire(await run(size, export_memory, data, kind, self._limits.values))
            # Always in a thread: a span is a hundred times the work of its bytes' parsing.
            export, reported = await run(
                LARGE_BODY_BYTES + 1, self._read, data, kind, caller_of(scope)
            )
            problem = await self._ingest.commit(reported)
            export = replace(export, problem=export.problem or problem)
            response = Response(export_response(export, kind), media_type=kind)
        except ApiError as error:
            response = error.response()
        except ClientDisconnected:
            return
        await response(scope, receive, send)

    async def _unpacked(self, raw: bytes, encoding: str, lease: MemoryLease) -> bytes:
        """Raises BadRequest (413) for more than the limit, Unavailable where memory is short."""
        unpacker, limit = Decompressor(raw, encoding), self._limits.body
        pieces: list[bytes] = []
        size = 0
        while piece := await self._workers.run(LARGE_BODY_BYTES + 1, unpacker.read, _PIECE):
            size += len(piece)
            if size > limit:
                raise BadRequest(
                    f"the body unpacks to more than {limit >> 20} MiB (max_body_mib)",
                    status=413,
                    code="body_too_large",
                )
            await lease.acquire(len(piece))
            pieces.append(piece)
        return b"".join(pieces)

    def _read(
        self, data: bytes, kind: str, caller: Caller
    ) -> tuple[OtlpExport, list[ReportedSpan]]:
        export = read_export(data, kind, self._limits.spans)
        reported = [read_span(span) for span in restrict_to_rollout(export.spans, caller)]
        return export, reported if caller.may_reward else [
            without_evaluations(each) for each in reported
        ]
