"""Spans: OpenTelemetry inside a rollout, exported over OTLP/HTTP to the rollout's proxy.

If the process has set up a TracerProvider of the OpenTelemetry SDK, ours and theirs are one: our
spans go through it, and all of its spans that begin inside a rollout also reach the proxy. If
not, our spans go through a private provider and the global one stays unset, so that the agent
may still set up its own at any time; it is found at the next span.

A span is encoded where it ends and goes the way of the events: into the journal, and from there to
`/v1/traces`. There is no queue in memory that could overflow. Nothing here raises into the agent.

OpenTelemetry is imported with this module, and this module with the first rollout.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Status, StatusCode
from opentelemetry.util.types import Attributes

from tracegrad import context
from tracegrad.exporter import EventExporter, exporter
from tracegrad.protocol import ROLLOUT_ATTRIBUTE
from tracegrad.serializer import bounded_str, error_line
from tracegrad.signal_errors import is_of_signal_handler

_log = logging.getLogger("tracegrad")

_TRACER = "tracegrad"
# Bytes of all of a span's texts; of a larger one each text is cut to so many characters.
MAX_SPAN_BYTES = 1_000_000
CUT_TEXT_CHARS = 10_000
STACK_FRAMES, CAUSES = 32, 4
_INT64 = 1 << 63
MAX_DEPTH = 20  # of an attribute's lists and mappings


class RolloutSpanProcessor(SpanProcessor):
    """Marks the spans that begin inside a rollout, and exports those alone."""

    def __init__(self, to: EventExporter) -> None:
        self._exporter = to

    def on_start(self, span: SdkSpan, parent_context: otel_context.Context | None = None) -> None:
        rollout = context.current()
        if rollout is not None:
            span.set_attribute(ROLLOUT_ATTRIBUTE, rollout.id)
            scope = span.instrumentation_scope
            if scope is None or scope.name != _TRACER:
                rollout.may_have_calls = True

    def on_end(self, span: ReadableSpan) -> None:
        if span.attributes and ROLLOUT_ATTRIBUTE in span.attributes:
            _export(span, self._exporter)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.flush(timeout_millis / 1e3)


class CalledSpanProcessor(SpanProcessor):
    """Exports the spans that come of another process's calls: those whose parent is there, and
    those below them. No rollout is known here; the proxy knows whose their trace is.

    What is inside of a rollout of this process is `RolloutSpanProcessor`'s.
    """

    def __init__(self, to: EventExporter) -> None:
        self._exporter = to
        self._open: set[int] = set()  # ids of spans

    def on_start(self, span: SdkSpan, parent_context: otel_context.Context | None = None) -> None:
        parent = span.parent
        if parent is None or context.current() is not None:
            return
        if parent.is_remote or parent.span_id in self._open:
            self._open.add(span.get_span_context().span_id)

    def on_end(self, span: ReadableSpan) -> None:
        span_id = span.context.span_id if span.context is not None else None
        if span_id in self._open:
            self._open.discard(span_id)
            _export(span, self._exporter)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.flush(timeout_millis / 1e3)


def _export(span: ReadableSpan, to: EventExporter) -> None:
    try:
        size = _size(span)
        truncated = size is not None and size > MAX_SPAN_BYTES
        plain = span if size is not None and not truncated else _copy(span, cut=truncated)
        protobuf = _encode(plain).SerializeToString()
    except Exception as error:
        to.drop("unencodable")
        if is_of_signal_handler(error):
            raise
        _log.warning("tracegrad could not encode a span", exc_info=True)
        return
    to.put_span(protobuf, truncated=truncated)


def _encode(span: ReadableSpan) -> ExportTraceServiceRequest:
    """What `encode_spans` makes of it. That one logs whatever is raised while it encodes an
    attribute, and goes on: a time-out of the agent's signal handler too. So it gets none of them.
    """
    scope = span.instrumentation_scope
    bare = ReadableSpan(
        name=span.name,
        context=span.context,
        parent=span.parent,
        resource=Resource({}, span.resource.schema_url),
        events=[Event(each.name, None, each.timestamp) for each in span.events],
        links=[trace.Link(each.context) for each in span.links],
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=scope
        and InstrumentationScope(scope.name, scope.version, scope.schema_url),
    )
    message = encode_spans([bare])
    [of_resource] = message.resource_spans
    [of_scope] = of_resource.scope_spans
    [encoded] = of_scope.spans
    of_resource.resource.attributes.extend(_key_values(span.resource.attributes))
    if scope is not None:
        of_scope.scope.attributes.extend(_key_values(scope.attributes))
    encoded.attributes.extend(_key_values(span.attributes))
    encoded.dropped_attributes_count = span.dropped_attributes
    encoded.dropped_events_count = span.dropped_events
    encoded.dropped_links_count = span.dropped_links
    for event, now in zip(span.events, encoded.events, strict=True):
        now.attributes.extend(_key_values(event.attributes))
        now.dropped_attributes_count = event.dropped_attributes
    for link, now in zip(span.links, encoded.links, strict=True):
        now.attributes.extend(_key_values(link.attributes))
        now.dropped_attributes_count = link.dropped_attributes
    return message


def _key_values(attributes: Mapping[str, Any] | None, depth: int = 0) -> Iterator[KeyValue]:
    for key, value in (attributes or {}).items():
        yield KeyValue(key=_utf8(str(key)), value=_any_value(value, depth))


def _any_value(value: Any, depth: int) -> AnyValue:
    """What OTLP has no form for is text."""
    if value is None:
        return AnyValue()
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=_utf8(value))
    if isinstance(value, int):
        if -_INT64 <= value < _INT64:
            return AnyValue(int_value=value)
        return AnyValue(string_value=_utf8(bounded_str(value, CUT_TEXT_CHARS)))
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, bytes):
        return AnyValue(bytes_value=value)
    if isinstance(value, Mapping) and depth < MAX_DEPTH:
        return AnyValue(kvlist_value=KeyValueList(values=_key_values(value, depth + 1)))
    if isinstance(value, Sequence) and depth < MAX_DEPTH:
        values = [_any_value(each, depth + 1) for each in value]
        return AnyValue(array_value=ArrayValue(values=values))
    return AnyValue(string_value=_utf8(bounded_str(value, CUT_TEXT_CHARS)))


def _utf8(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _size(span: ReadableSpan) -> int | None:
    """Bytes of all of its texts; None if one of them is no UTF-8 (a lone surrogate)."""
    texts: list[Any] = [span.name, span.status.description or ""]
    held = [span.attributes, *(e.attributes for e in span.events)]
    for attributes in (*held, *(link.attributes for link in span.links)):
        texts += (attributes or {}).values()
    try:
        return sum(map(_length, texts)) + sum(len(event.name.encode()) for event in span.events)
    except UnicodeEncodeError:
        return None


def _length(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode())
    return sum(map(_length, value)) if isinstance(value, list | tuple) else 8


def _copy(span: ReadableSpan, *, cut: bool) -> ReadableSpan:
    """The span with every text in UTF-8; with `cut`, of large ones the beginning alone."""
    most = CUT_TEXT_CHARS if cut else None

    def cleaned(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
        return {name: _clean(value, most) for name, value in (attributes or {}).items()}

    description = _clean(span.status.description, most)
    events = [Event(_clean(e.name, most), cleaned(e.attributes), e.timestamp) for e in span.events]
    return ReadableSpan(
        name=_clean(span.name, most),
        context=span.context,
        parent=span.parent,
        resource=span.resource,
        attributes=cleaned(span.attributes),
        events=events,
        links=[] if cut else [trace.Link(ln.context, cleaned(ln.attributes)) for ln in span.links],
        kind=span.kind,
        status=Status(span.status.status_code, description),
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def _clean(value: Any, most: int | None) -> Any:
    if isinstance(value, str):
        text = value[:most].encode("utf-8", "replace").decode()
        more = len(value) - len(text)
        return f"{text}… ({more} more characters)" if more > 0 else text
    if isinstance(value, list | tuple):
        return [_clean(item, most and 100) for item in value[: most and 1_000]]
    return value


_lock = threading.RLock()
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.RLock()))
_private: dict[str, TracerProvider] = {}
_tracers: WeakKeyDictionary[TracerProvider, trace.Tracer] = WeakKeyDictionary()


def tracer(url: str) -> trace.Tracer:
    """The tracer whose spans reach the proxy at `url`."""
    with _lock:
        if _make_global_next:
            make_global(url)
        provider = provider_of(url)
        if (found := _tracers.get(provider)) is None:
            found = _tracers[provider] = provider.get_tracer(_TRACER)
        return found


_joined: WeakSet[TracerProvider] = WeakSet()  # whose spans of rollouts reach a proxy


def provider_of(url: str) -> TracerProvider:
    """The process's provider, joined; where it has none, a private one for the proxy at `url`."""
    theirs = trace.get_tracer_provider()
    with _lock:
        if isinstance(theirs, TracerProvider):
            if theirs not in _joined:
                theirs.add_span_processor(RolloutSpanProcessor(exporter(url)))
                _joined.add(theirs)
            return theirs
        if url not in _private:
            # Not theirs to sample; and the exporter flushes at exit, in its own time.
            private = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
            private.add_span_processor(RolloutSpanProcessor(exporter(url)))
            _joined.add(private)
            _private[url] = private
        return _private[url]


_make_global_next = False  # at the next span of ours


def make_global_with_first_rollout() -> None:
    """As `make_global`, once a rollout begins: until then the agent may set up its own."""
    global _make_global_next
    _make_global_next = True


def make_global(url: str) -> None:
    """For libraries that ask for the process's provider and take no other: where the process has
    none, the private one becomes that. The agent cannot set up its own any more: OpenTelemetry
    takes one for a process."""
    global _make_global_next
    _make_global_next = False
    provider = provider_of(url)
    if trace.get_tracer_provider() is not provider:
        trace.set_tracer_provider(provider)


_serving: WeakSet[TracerProvider] = WeakSet()  # whose spans of other processes' calls reach a proxy


def serve(url: str) -> None:
    """For a server whose library makes spans for the process's provider: those of calls from
    rollouts in other processes reach the proxy."""
    with _lock:
        provider = provider_of(url)
        if provider not in _serving:
            provider.add_span_processor(CalledSpanProcessor(exporter(url)))
            _serving.add(provider)
    make_global(url)


class FollowingTracerProvider(trace.TracerProvider):
    """To be given to instrumentors, which keep their tracer for good: each span goes through the
    provider that the process has when it begins. So the agent may set up its own later."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes | None = None,
    ) -> trace.Tracer:
        scope = (instrumenting_module_name, instrumenting_library_version, schema_url, attributes)
        return _FollowingTracer(self._url, scope)


class _FollowingTracer(trace.Tracer):
    def __init__(self, url: str, scope: tuple[Any, ...]) -> None:
        self._url = url
        self._scope = scope
        self._of: WeakKeyDictionary[TracerProvider, trace.Tracer] = WeakKeyDictionary()

    def _now(self) -> trace.Tracer:
        provider = provider_of(self._url)
        if (found := self._of.get(provider)) is None:
            found = self._of[provider] = provider.get_tracer(*self._scope)
        return found

    @property
    def id_generator(self) -> Any:  # OpenInference's tracer asks for it
        return getattr(self._now(), "id_generator", None)

    def start_span(self, *args: Any, **kwargs: Any) -> trace.Span:
        return self._now().start_span(*args, **kwargs)

    def start_as_current_span(self, *args: Any, **kwargs: Any) -> Any:
        return self._now().start_as_current_span(*args, **kwargs)


_entered: ContextVar[object] = ContextVar("tracegrad_span", default=None)


class SpanScope:
    """`with SpanScope(name, url):` a span that is current inside, and failed if an error leaves.

    Where there can be none (settings of OpenTelemetry's own that it refuses, a span processor of
    the agent's that raises), the code inside runs all the same.
    """

    def __init__(self, name: str, url: str, *, root: bool = False) -> None:
        """`root`: the span that is current here is none of this one's."""
        self._name = name
        self._url = url
        self._around = otel_context.Context() if root else None
        self._span: trace.Span | None = None

    def __enter__(self) -> None:
        try:
            self._span = span = tracer(self._url).start_span(self._name, self._around)
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            _lose_span(self._url)
            return
        self._token = otel_context.attach(trace.set_span_in_context(span))
        self._mark = _entered.set(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._span is None:
            return
        try:
            # Only errors: leaving by GeneratorExit or a cancellation is no failure of the span.
            if isinstance(error, Exception):
                _record_error(self._span, error)
            self._span.end()
        except Exception as error:
            if is_of_signal_handler(error):
                self._detach()
                raise
            _lose_span(self._url)
        self._detach()

    def _detach(self) -> None:
        # In another context than it was entered in (see context.inside) there is nothing to
        # detach, and OpenTelemetry would log a traceback about it.
        try:
            _entered.reset(self._mark)
        except ValueError:
            return
        otel_context.detach(self._token)


def _lose_span(url: str) -> None:
    if exporter(url).drop("span_failed") == 1:  # the others are counted
        _log.warning("tracegrad could not record a span", exc_info=True)


def _record_error(span: trace.Span, error: Exception) -> None:
    """What `span.record_exception` does, for errors of any depth, size and manners."""
    message = bounded_str(error, CUT_TEXT_CHARS)
    event = {"exception.type": f"{type(error).__module__}.{type(error).__qualname__}"}
    event |= {"exception.message": message, "exception.stacktrace": _stack(error)}
    span.add_event("exception", {**event, "exception.escaped": "False"})
    span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {message}"))


def _stack(error: BaseException) -> str:
    """The innermost frames of the error and of its nearest causes, the first cause first."""
    parts: list[str] = []
    each: BaseException | None = error
    while each is not None and len(parts) < CAUSES:
        frames = "".join(traceback.format_tb(each.__traceback__, -STACK_FRAMES))
        head = "Traceback (most recent call last):\n" if frames else ""
        parts.append(f"{head}{frames}{error_line(each, CUT_TEXT_CHARS)}\n")
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return "\nThen:\n\n".join(reversed(parts))
