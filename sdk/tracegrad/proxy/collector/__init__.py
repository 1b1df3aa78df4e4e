"""OpenTelemetry spans over HTTP: `POST /v1/traces`, ours and those of other libraries."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tracegrad.proxy.access import Caller, caller_of, owned
from tracegrad.proxy.collector.ingest import Ingest
from tracegrad.proxy.collector.otlp import (
    JSON,
    PROTOBUF,
    ROLLOUT_ATTRIBUTE,
    Export,
    answer,
    read_export,
    type_of,
)
from tracegrad.proxy.collector.told import Told, told_by
from tracegrad.proxy.connection import ClientGone, headers_of, read_body
from tracegrad.proxy.errors import ApiError

__all__ = ["JSON", "PROTOBUF", "ROLLOUT_ATTRIBUTE", "Ingest", "Traces"]


class Traces:
    def __init__(self, ingest: Ingest, *, max_body_bytes: int) -> None:
        self._ingest = ingest
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        try:
            kind = type_of(headers.get("content-type", ""))
            encoding = headers.get("content-encoding", "identity")
            raw = await read_body(receive, self._max_body_bytes)
            export, told = await asyncio.to_thread(
                self._read, raw, kind, encoding, caller_of(scope)
            )
            problem = await self._ingest.take(told)
            export = replace(export, problem=export.problem or problem)
            response = Response(answer(export, kind), media_type=kind)
        except ApiError as error:
            response = error.response()
        except ClientGone:
            return
        await response(scope, receive, send)

    def _read(
        self, raw: bytes, kind: str, encoding: str, caller: Caller
    ) -> tuple[Export, list[Told]]:
        export = read_export(raw, kind, encoding, self._max_body_bytes)
        return export, [told_by(span) for span in owned(export.spans, caller)]
