"""Spans leave over OTLP, marked with their rollout; a provider of the agent's own is joined."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider

import tracegrad
from support.sdk.fake_proxy import FakeProxy
from support.system.log_lines import our_lines
from tracegrad import exporter, rollout, telemetry, trace


def rollout_of(span: object) -> str | None:
    attributes = {a.key: a.value.string_value for a in span.attributes}  # type: ignore[attr-defined]
    return attributes.get("tracegrad.rollout")


def test_nested_calls_are_a_tree_of_spans(proxy: FakeProxy) -> None:
    @trace(name="look up")
    def tool() -> None:
        raise LookupError("nothing there")

    @trace
    async def agent() -> None:
        with pytest.raises(LookupError):
            tool()
        await asyncio.gather(helper(), helper())

    @trace
    async def helper() -> None:
        await asyncio.sleep(0.001)

    asyncio.run(agent())
    spans = proxy.spans()
    (opened,) = proxy.events("rollout_started")
    (root,) = (span for span in spans if not span.parent_span_id)
    assert root.name.endswith("agent")
    assert len(spans) == 4
    assert {span.trace_id for span in spans} == {root.trace_id}
    assert {span.parent_span_id for span in spans} == {b"", root.span_id}
    assert {rollout_of(span) for span in spans} == {opened["rollout_id"]}
    (failed,) = (span for span in spans if span.name == "look up")
    assert (failed.status.code, failed.status.message) == (2, "LookupError: nothing there")
    assert root.status.code == 0
    assert all(
        root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        for span in spans
    )
    (request, *_) = proxy.sent_to("/v1/traces")
    assert request.headers["content-type"] == "application/x-protobuf"


def test_each_rollout_is_a_trace_of_its_own_and_the_global_provider_is_left_alone(
    proxy: FakeProxy,
) -> None:
    for _ in range(2):
        with rollout():
            pass
    assert len({span.trace_id for span in proxy.spans()}) == 2
    assert not isinstance(otel.get_tracer_provider(), TracerProvider)
    assert otel_context.get_current() == {}


def test_a_rollout_left_in_another_context_disturbs_nothing(
    proxy: FakeProxy, caplog: pytest.LogCaptureFixture
) -> None:
    def fixture() -> object:
        with rollout():
            yield

    async def enter(generator: object) -> None:
        next(generator)  # type: ignore[call-overload]

    async def leave(generator: object) -> None:
        generator.close()  # type: ignore[attr-defined]

    async def main() -> None:
        generator = fixture()
        await asyncio.create_task(enter(generator))
        await asyncio.create_task(leave(generator))

    asyncio.run(main())
    assert proxy.events("rollout_finished")[0]["outcome"] == "aborted"
    assert our_lines(caplog) == []


def test_spans_wait_in_the_journal_until_the_proxy_takes_them(proxy: FakeProxy) -> None:
    proxy.statuses["/v1/traces"] = [503, 429, 500]
    with rollout(agent="a") as r:
        pass
    (span,) = proxy.spans()
    assert (span.name, rollout_of(span)) == ("a", r.id)
    assert not span.parent_span_id
    assert span.start_time_unix_nano < span.end_time_unix_nano


def test_no_span_is_dropped_however_many_come_at_once(proxy: FakeProxy) -> None:
    """More than any queue in memory holds, faster than they can be sent."""

    @trace(name="step")
    def step() -> None:
        pass

    proxy.statuses["/v1/traces"] = [503]
    with rollout(agent="loop"):
        for _ in range(5_000):
            step()
    assert tracegrad.flush(60)
    assert len({span.span_id for span in proxy.spans()}) == len(proxy.spans()) == 5_001
    assert tracegrad.stats().dropped == {}


def test_a_span_of_any_size_is_cut_and_counted(proxy: FakeProxy) -> None:
    provider = TracerProvider()
    provider.add_span_processor(telemetry.RolloutSpanProcessor(exporter.exporter(proxy.url)))
    with rollout(), provider.get_tracer("theirs").start_as_current_span("large") as span:
        span.set_attribute("prompt", "x" * 3_000_000)
        span.set_attribute("many", ["y" * 1_000] * 500)
        span.add_event("said", {"text": "z" * 500_000})
    assert tracegrad.flush(60)
    (kept,) = (span for span in proxy.spans() if span.name == "large")
    assert kept.ByteSize() < 200_000
    texts = {a.key: a.value.string_value for a in kept.attributes}
    assert texts["prompt"].endswith("(2990000 more characters)")
    assert tracegrad.stats().truncated == 1


def test_an_agent_runs_where_no_span_can_be_made(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(url: str) -> otel.Tracer:
        raise ValueError("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT is no number")

    monkeypatch.setattr(telemetry, "tracer", broken)
    with rollout() as r:
        r.reward(1)
    assert [event["type"] for event in proxy.events()][1:] == ["reward", "rollout_finished"]
    with rollout():
        pass
    assert tracegrad.stats().dropped == {"span_failed": 2}
    assert caplog.text.count("could not record a span") == 1


def test_a_setting_that_opentelemetry_refuses_at_import_costs_spans_alone(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so once in a process, so that this takes one of its own."""
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many")
    code = (
        "import tracegrad\n"
        "step = tracegrad.trace(lambda: None)\n"
        "with tracegrad.rollout() as r: step(); r.reward(1)\n"
        "print(tracegrad.stats().dropped)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "{'span_failed': 2}\n"), done.stderr
    assert done.stderr.count("tracegrad records no spans") == 1
    kinds = [event["type"] for event in proxy.events()]
    assert kinds == ["rollout_started", "reward", "rollout_finished"]


class _Nameless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text of its own")


def test_an_error_without_a_text_is_the_agents_all_the_same(proxy: FakeProxy) -> None:
    error = _Nameless()
    with pytest.raises(_Nameless) as caught, rollout():
        raise error
    assert caught.value is error
    (span,) = proxy.spans()
    assert span.status.message == "_Nameless: <_Nameless>"
    assert span.events[0].name == "exception"


WITH_A_PROVIDER = """
import json
from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import tracegrad

with tracegrad.rollout(agent="before"):
    pass
theirs = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(theirs))
otel.set_tracer_provider(provider)
tracer = otel.get_tracer("theirs")
with tracer.start_as_current_span("request"):
    with tracegrad.rollout(agent="first") as r:
        with tracer.start_as_current_span("search"):
            pass
    with tracegrad.rollout(agent="second"):
        pass
with tracer.start_as_current_span("outside"):
    pass
print(json.dumps([[s.name, s.parent.span_id if s.parent else None, s.context.span_id]
                  for s in theirs.get_finished_spans()]))
"""


def test_the_agents_own_provider_is_joined_whenever_it_comes(proxy: FakeProxy) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_PROVIDER],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    spans = {span.name: span for span in proxy.spans()}
    assert sorted(spans) == ["before", "first", "search", "second"]
    assert len(proxy.spans()) == 4, "the processor is added once"
    assert spans["search"].parent_span_id == spans["first"].span_id
    assert rollout_of(spans["search"]) == rollout_of(spans["first"]) != rollout_of(spans["second"])
    theirs = {name: (parent, own) for name, parent, own in json.loads(done.stdout)}
    assert sorted(theirs) == ["first", "outside", "request", "search", "second"]
    assert theirs["first"][0] == theirs["request"][1]


def test_a_server_sends_what_comes_of_another_process_s_calls(
    proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_global: list[object] = []
    monkeypatch.setattr(otel, "set_tracer_provider", made_global.append)
    telemetry.serve(proxy.url)
    telemetry.serve(proxy.url)
    provider = telemetry.provider_of(proxy.url)
    assert set(made_global) == {provider}
    tracer = provider.get_tracer("server")
    caller = otel.SpanContext(7, 8, is_remote=True, trace_flags=otel.TraceFlags(1))
    around = otel.set_span_in_context(otel.NonRecordingSpan(caller))
    with (
        tracer.start_as_current_span("tools/call", context=around),
        tracer.start_as_current_span("read"),
    ):
        pass
    with tracer.start_as_current_span("of nobody's call"), tracer.start_as_current_span("below"):
        pass
    with rollout(agent="a") as r, tracer.start_as_current_span("step", context=around):
        pass
    spans = {span.name: span for span in proxy.spans()}
    assert sorted(span.name for span in proxy.spans()) == ["a", "read", "step", "tools/call"]
    call, read = spans["tools/call"], spans["read"]
    assert int.from_bytes(call.trace_id, "big") == int.from_bytes(read.trace_id, "big") == 7
    assert int.from_bytes(call.parent_span_id, "big") == 8
    assert read.parent_span_id == call.span_id
    assert (rollout_of(call), rollout_of(spans["step"])) == (None, r.id)


def test_flush_returns_whether_everything_left(
    free_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.setenv("TRACEGRAD_URL", f"http://127.0.0.1:{free_port}")
    with rollout():
        pass
    assert not tracegrad.flush(0.2)


def test_a_span_is_encoded_as_opentelemetry_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=a,stage=b")
    limits = SpanLimits(max_attributes=8, max_events=2, max_links=2, max_event_attributes=1)
    provider = TracerProvider(span_limits=limits)
    tracer = provider.get_tracer("theirs", "1.2", "https://schema", {"of": "the scope"})
    state = otel.TraceState([("vendor", "x")])
    far = otel.SpanContext(5, 6, True, otel.TraceFlags(1), state)
    attributes = {"text": "ä", "on": True, "many": [1, 2], "real": 0.5, "none": [], "x": "", "y": 1}
    links = [otel.Link(far, {"a": "b"}), otel.Link(far), otel.Link(far)]
    around = otel.set_span_in_context(otel.NonRecordingSpan(far))
    span = tracer.start_span("s", around, otel.SpanKind.CLIENT, {**attributes, "z": 3}, links)
    span.set_attribute("too many", 1)
    for name in ("first", "second", "third"):
        span.add_event(name, {"one": 1, "two": 2})
    span.set_status(otel.StatusCode.ERROR, "broke")
    span.end()
    assert isinstance(span, ReadableSpan)
    assert (span.dropped_attributes, span.dropped_events, span.dropped_links) == (1, 1, 1)
    assert telemetry._encode(span) == encode_spans([span])
    bare = ReadableSpan("bare", otel.SpanContext(1, 2, is_remote=False))
    assert telemetry._encode(bare) == encode_spans([bare])


def test_a_value_that_otlp_has_no_form_for_costs_no_span() -> None:
    deep: list[object] = []
    for _ in range(500):
        deep = [deep]
    odd = {"large": 2**70, "deep": deep, "lone \ud800": "\ud800", "own": {1: object()}, "b": b"x"}
    span = ReadableSpan("odd", otel.SpanContext(1, 2, is_remote=False), attributes=odd)
    message = telemetry._encode(span)
    [encoded] = message.resource_spans[0].scope_spans[0].spans
    found = {each.key: each.value for each in encoded.attributes}
    assert found["large"].string_value == str(2**70)
    assert found["lone ?"].string_value == "?"
    assert found["own"].kvlist_value.values[0].key == "1"
    assert found["b"].bytes_value == b"x"
    assert len(message.SerializeToString()) < 10_000
