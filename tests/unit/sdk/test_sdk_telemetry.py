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
from opentelemetry.sdk.trace import TracerProvider
from sdk_server import FakeProxy

import tracegrad
from tracegrad import rollout, trace


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
    (opened,) = proxy.events("rollout_opened")
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
    assert not caplog.records


def test_spans_that_cannot_leave_by_otlp_go_with_the_events(proxy: FakeProxy) -> None:
    proxy.statuses["/v1/traces"] = [503]
    with rollout(agent="a") as r:
        pass
    assert proxy.spans() == []
    (event,) = proxy.events("span_ended")
    assert (event["name"], event["rollout_id"], event["status"]) == ("a", r.id, "unset")
    assert (len(event["trace_id"]), len(event["span_id"])) == (32, 16)
    assert event["parent_span_id"] is None
    assert event["start_ns"] < event["end_ns"]
    assert event["attributes"] == {"tracegrad.rollout": r.id}


WITH_A_PROVIDER = """
import json
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
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


def test_flush_tells_whether_everything_left(
    free_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.setenv("TRACEGRAD_URL", f"http://127.0.0.1:{free_port}")
    with rollout():
        pass
    assert not tracegrad.flush(0.2)
    tracegrad.client.outbox(f"http://127.0.0.1:{free_port}").close(0)
