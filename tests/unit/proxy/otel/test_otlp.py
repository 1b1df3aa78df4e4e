"""OTLP as JSON: what is read of it, what is refused, and how that is said."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from support.proxy.otlp_json import TRACE, Json, export, span, span_id
from support.proxy.proxy_with_engine import ProxyWithEngine
from tracegrad.protocol import ROLLOUT_ATTRIBUTE
from tracegrad.proxy.http.errors import BadRequest
from tracegrad.proxy.otel.otlp import JSON, PROTOBUF, read_export

RECORDED = Path(__file__).resolve().parents[3] / "support" / "recorded_spans"
LIMIT = 1 << 20


def as_json(reported: Json) -> bytes:
    return json.dumps(reported).encode()


def as_protobuf(reported: Json) -> bytes:
    """By protobuf's own reader of JSON, with ids as it wants them."""
    request = ParseDict(_without_ids(reported), ExportTraceServiceRequest())
    for resource, theirs in zip(request.resource_spans, reported["resourceSpans"], strict=True):
        for scope, spans in zip(resource.scope_spans, theirs["scopeSpans"], strict=True):
            for made, each in zip(scope.spans, spans["spans"], strict=True):
                made.trace_id = bytes.fromhex(each["traceId"])
                made.span_id = bytes.fromhex(each["spanId"])
                made.parent_span_id = bytes.fromhex(each.get("parentSpanId", ""))
    encoded: bytes = request.SerializeToString()
    return encoded


def _without_ids(reported: Any) -> Any:
    if isinstance(reported, list):
        return [_without_ids(each) for each in reported]
    if isinstance(reported, dict):
        ids = ("traceId", "spanId", "parentSpanId")
        return {name: _without_ids(each) for name, each in reported.items() if name not in ids}
    return reported


@pytest.mark.parametrize("recorded", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_json_and_protobuf_are_read_alike(recorded: Path) -> None:
    reported = json.loads(recorded.read_text())
    by_json = read_export(as_json(reported), JSON, LIMIT)
    by_protobuf = read_export(as_protobuf(reported), PROTOBUF, LIMIT)
    assert len(by_json.spans) == 4
    assert by_json == by_protobuf


def test_every_kind_of_value_is_kept(rig: ProxyWithEngine) -> None:
    reported: list[Json] = [
        {"key": "tracegrad.rollout", "value": {"stringValue": "r1"}},
        {"key": "big", "value": {"intValue": "9007199254740993"}},
        {"key": "int", "value": {"intValue": 7}},
        {"key": "nan", "value": {"doubleValue": "NaN"}},
        {"key": "bytes", "value": {"bytesValue": "AQI="}},
        {"key": "none", "value": {}},
        {"key": "list", "value": {"arrayValue": {"values": [{"boolValue": True}, {}]}}},
        {
            "key": "tree",
            "value": {"kvlistValue": {"values": [{"key": "x", "value": {"doubleValue": 0.5}}]}},
        },
    ]
    one = span(1, "work", error="broke", events=[("note", {"n": 1})]) | {"attributes": reported}
    body = gzip.compress(as_json(export([one | {"unheardOf": [1]}])))
    answer = rig.http.post(
        "/v1/traces",
        content=body,
        headers={"content-type": "application/json; charset=utf-8", "content-encoding": "gzip"},
    )
    assert (answer.status_code, answer.json()) == (200, {})
    assert answer.headers["content-type"] == "application/json"
    [kept] = rig.store.spans("r1")
    assert (kept.trace_id, kept.span_id, kept.kind) == (TRACE, span_id(1), "internal")
    assert kept.status == "error"
    assert kept.attributes.pop("otel.events")[0]["attributes"] == {"n": 1}
    assert kept.attributes == {
        "tracegrad.rollout": "r1",
        "big": 9007199254740993,
        "int": 7,
        "nan": "nan",
        "bytes": "AQI=",
        "none": None,
        "list": [True, None],
        "tree": {"x": 0.5},
        "otel.status_description": "broke",
    }


GOOD = span(1, "good", {"tracegrad.rollout": "r1"})
BAD = [
    GOOD | {"spanId": span_id(2), "name": "bad", "traceId": "0" * 32},
    GOOD | {"spanId": span_id(2), "name": "bad", "traceId": TRACE[:-2]},
    GOOD | {"spanId": "xyz", "name": "bad"},
    GOOD | {"spanId": 7, "name": "bad"},
    GOOD | {"spanId": span_id(2), "name": "bad", "endTimeUnixNano": str(2**64 - 1)},
]


@pytest.mark.parametrize("bad", BAD)
def test_a_span_that_cannot_be_kept_is_reported_and_the_others_are_kept(
    rig: ProxyWithEngine, bad: Json
) -> None:
    answer = rig.http.post("/v1/traces", json=export([bad, GOOD]))
    assert answer.status_code == 200
    partial = answer.json()["partialSuccess"]
    assert partial["rejectedSpans"] == "1"
    assert partial["errorMessage"].startswith("span 'bad': ")
    assert [each.name for each in rig.store.spans("r1")] == ["good"]


def test_protobuf_is_answered_in_protobuf(rig: ProxyWithEngine) -> None:
    reported = as_protobuf(export([GOOD, GOOD | {"spanId": "", "name": "bad"}]))
    answer = rig.http.post("/v1/traces", content=reported, headers={"content-type": PROTOBUF})
    assert (answer.status_code, answer.headers["content-type"]) == (200, PROTOBUF)
    partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert partial.rejected_spans == 1
    assert "spanId" in partial.error_message
    assert len(rig.store.spans("r1")) == 1


def test_a_name_that_no_rollout_can_have_is_reported_and_its_span_kept(
    rig: ProxyWithEngine,
) -> None:
    answer = rig.http.post("/v1/traces", json=export([span(1, "x", {"tracegrad.rollout": "a b"})]))
    partial = answer.json()["partialSuccess"]
    assert partial["rejectedSpans"] == "0"
    assert "no rollout id" in partial["errorMessage"]
    assert rig.store.rollouts() == []
    with rig.store.reading() as connection:
        assert connection.exec_driver_sql("select count(*) from spans").scalar() == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"null",
        b'{"resourceSpans": 5}',
        b'{"resourceSpans": [7]}',
        b'{"resourceSpans": [{"scopeSpans": {"spans": []}}]}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "soon"}]}]}]}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": {}}]}]}]}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"endTimeUnixNano": -1}]}]}]}',
        b'{"resourceSpans": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"\xff": 1}',
    ],
)
def test_what_is_no_export_is_refused(rig: ProxyWithEngine, body: bytes) -> None:
    answer = rig.http.post("/v1/traces", content=body, headers={"content-type": JSON})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the body is not an OTLP export: ")


NAMES = st.sampled_from(
    [
        *("resourceSpans", "scopeSpans", "spans", "attributes", "key", "value", "arrayValue"),
        *("values", "links", "events", "kind", "traceId", "spanId", "parentSpanId"),
        "startTimeUnixNano",
    ]
)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=15,
)
FIELDS = st.sampled_from([*GOOD, "links", "flags", "status", "droppedEventsCount"])


@given(st.dictionaries(FIELDS, ANY_JSON, max_size=4), ANY_JSON)
def test_whatever_comes_is_read_or_refused(changes: Json, anything: Any) -> None:
    for reported in (export([GOOD | changes]), {"resourceSpans": anything}, anything):
        try:
            read = read_export(as_json(reported), JSON, LIMIT)
        except BadRequest:  # which names nothing but the request
            continue
        assert bool(read.problem) or not read.rejected


# What an export may be: packed, and how much of it


def packed(encoding: str, data: bytes) -> bytes:
    return gzip.compress(data) if encoding == "gzip" else zlib.compress(data)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_packed_export_is_unpacked(rig: ProxyWithEngine, encoding: str) -> None:
    body = packed(encoding, as_json(export([span(1, "x" * 100_000, {ROLLOUT_ATTRIBUTE: "r1"})])))
    headers = {"content-encoding": encoding, "content-type": JSON}
    assert rig.http.post("/v1/traces", content=body, headers=headers).json() == {}
    [kept] = rig.store.spans("r1")
    assert len(kept.name) == 100_000


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_packed_export_is_not_unpacked_beyond_the_limit(
    rig: ProxyWithEngine, encoding: str
) -> None:
    headers = {"content-encoding": encoding, "content-type": JSON}
    answer = rig.http.post(
        "/v1/traces", content=packed(encoding, b" " * (33 << 20)), headers=headers
    )
    assert answer.status_code == 413
    assert "max_body_mib" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", gzip.compress(b"{}")[:-9], 400),
        ("gzip", b"", 400),
        ("gzip", b"{}", 400),
        ("gzip", gzip.compress(b"{}") * 2, 400),
        ("deflate", gzip.compress(b"{}"), 400),
        ("zstd", b"{}", 415),
        ("br", b"{}", 415),
    ],
    ids=["cut short", "empty", "plain", "two", "gzip as deflate", "zstd", "brotli"],
)
def test_what_cannot_be_unpacked_is_refused(
    rig: ProxyWithEngine, encoding: str, body: bytes, status: int
) -> None:
    headers = {"content-encoding": encoding, "content-type": JSON}
    assert rig.http.post("/v1/traces", content=body, headers=headers).status_code == status


def test_spans_beyond_the_most_are_rejected_and_counted() -> None:
    reported = export([span(number, "s") for number in range(1, 8)])
    for data, kind in ((as_json(reported), JSON), (as_protobuf(reported), PROTOBUF)):
        read = read_export(data, kind, 5)
        assert [each.span_id for each in read.spans] == [span_id(number) for number in range(1, 6)]
        assert read.rejected == 2
        assert "max_spans" in read.problem


@pytest.mark.parametrize("depth", [50, 90, 200, 5000])
def test_values_in_each_other_are_kept_or_refused(rig: ProxyWithEngine, depth: int) -> None:
    value = '{"arrayValue":{"values":[' * depth + '{"stringValue":"x"}' + "]}}" * depth
    held = as_json(export([span(1, "s", {"a": "HERE"})]))
    body = held.replace(b'{"stringValue": "HERE"}', value.encode())
    assert len(body) > len(held)
    answer = rig.http.post("/v1/traces", content=body, headers={"content-type": JSON})
    assert answer.status_code in (200, 400), answer.text
