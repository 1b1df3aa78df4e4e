"""Spans: OpenTelemetry inside a rollout, exported over OTLP/HTTP to the rollout's proxy.

If the process has set up a TracerProvider of the OpenTelemetry SDK, ours and theirs are one: our
spans go through it, and all of its spans that begin inside a rollout also reach the proxy. If
not, our spans go through a private provider and the global one stays unset, so that the agent
may still set up its own at any time; it is found at the next span.

OpenTelemetry is imported with this module, and this module with the first rollout.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from types import TracebackType
from weakref import WeakSet

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Status, StatusCode

from tracegrad import context
from tracegrad.client import Outbox, Refused, Unreachable, outbox
from tracegrad.records import SpanEnded

EXPORT_EVERY_MS = 500.0


class OutboxExporter(SpanExporter):
    """Sends spans to `/v1/traces` as protobuf; when that fails, hands them to the outbox."""

    def __init__(self, box: Outbox) -> None:
        self._box = box

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            if self._box.unreachable:
                raise Unreachable
            body = encode_spans(spans).SerializeToString()
            self._box.post("/v1/traces", body, "application/x-protobuf")
        except (Unreachable, Refused):
            # It retries and keeps order, and what never gets through ends in its file.
            for span in spans:
                self._box.put(as_fact(span))
        return SpanExportResult.SUCCESS


class RolloutSpans(BatchSpanProcessor):
    """Marks the spans that begin inside a rollout, and exports those alone."""

    def __init__(self, box: Outbox) -> None:
        super().__init__(OutboxExporter(box), schedule_delay_millis=EXPORT_EVERY_MS)

    def on_start(self, span: SdkSpan, parent_context: otel_context.Context | None = None) -> None:
        rollout = context.current()
        if rollout is not None:
            span.set_attribute(context.ROLLOUT_KEY, rollout.id)

    def on_end(self, span: ReadableSpan) -> None:
        if span.attributes and context.ROLLOUT_KEY in span.attributes:
            super().on_end(span)


def as_fact(span: ReadableSpan) -> SpanEnded:
    """A span of OpenTelemetry as the record that the store keeps."""
    place, parent = span.context, span.parent
    assert place is not None, "an ended span has a context"
    attributes = dict(span.attributes or {})
    rollout_id = attributes.get(context.ROLLOUT_KEY)
    return SpanEnded(
        trace_id=f"{place.trace_id:032x}",
        span_id=f"{place.span_id:016x}",
        parent_span_id=f"{parent.span_id:016x}" if parent else None,
        rollout_id=None if rollout_id is None else str(rollout_id),
        name=span.name,
        kind=span.kind.name.lower(),
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0,
        status=span.status.status_code.name.lower(),
        attributes=attributes,
    )


_lock = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))
_private: dict[str, TracerProvider] = {}
_joined: WeakSet[TracerProvider] = WeakSet()


def tracer(url: str) -> trace.Tracer:
    """The tracer whose spans reach the proxy at `url`."""
    theirs = trace.get_tracer_provider()
    with _lock:
        if isinstance(theirs, TracerProvider):
            if theirs not in _joined:
                _joined.add(theirs)
                _feed(theirs, outbox(url))
            return theirs.get_tracer("tracegrad")
        if url not in _private:
            # Not theirs to sample; and the outbox flushes at exit, in its own time.
            _private[url] = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
            _feed(_private[url], outbox(url))
        return _private[url].get_tracer("tracegrad")


def _feed(provider: TracerProvider, box: Outbox) -> None:
    processor = RolloutSpans(box)
    provider.add_span_processor(processor)
    box.feeders.append(processor.force_flush)


_entered: ContextVar[object] = ContextVar("tracegrad_span", default=None)


class Span:
    """`with Span(name, url):` a span that is current inside, and failed if an error leaves."""

    def __init__(self, name: str, url: str) -> None:
        self._name = name
        self._url = url

    def __enter__(self) -> None:
        self._span = tracer(self._url).start_span(self._name)
        self._token = otel_context.attach(trace.set_span_in_context(self._span))
        self._mark = _entered.set(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Only errors: leaving by GeneratorExit or a cancellation is not a failure of the span.
        if isinstance(error, Exception):
            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        self._span.end()
        # In another context than it was entered in (see context.inside) there is nothing to
        # detach, and OpenTelemetry would log a traceback about it.
        try:
            _entered.reset(self._mark)
        except ValueError:
            return
        otel_context.detach(self._token)
