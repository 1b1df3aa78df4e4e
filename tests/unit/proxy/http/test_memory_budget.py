"""Memory for request bodies: how much one needs is known before it is parsed, and who gets it."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.types import Message

from tracegrad.protocol import TRACES_PATH
from tracegrad.proxy.http import json_size
from tracegrad.proxy.http.errors import BadRequest, Unavailable
from tracegrad.proxy.http.json_size import count_punctuation, count_punctuation_outside_strings
from tracegrad.proxy.http.request_body import (
    LARGE_BODY_BYTES,
    BodyReader,
    MemoryBudget,
    RequestSizeLimits,
    WorkerThreads,
    parsed_size,
)
from tracegrad.proxy.otel.otlp import JSON, PROTOBUF, export_memory
from tracegrad.proxy.otel.otlp_size import fields_in

# How large a JSON text is as objects

HARMLESS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(0, 99)
    | st.text(st.sampled_from('ab"\\,:[]{}\n'), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.sampled_from('a"\\,[{'), max_size=4), inner, max_size=4)
    ),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int]:
    """Brackets, and commas and colons, of a value as JSON writes it."""
    opening = between = 0
    if isinstance(value, list | dict):
        opening, between = 1, max(len(value) - 1, 0)
        if isinstance(value, dict):
            between += len(value)
        for inner in value.values() if isinstance(value, dict) else value:
            more = counted(inner)
            opening, between = opening + more[0], between + more[1]
    return opening, between


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_size, "_PIECE", 3)


@given(HARMLESS)
def test_values_are_counted_outside_of_strings(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for piece in (1, 2, 3, 7, 1 << 20):
            patch.setattr(json_size, "_PIECE", piece)
            for raw in (orjson.dumps(value), json.dumps(value, indent=1).encode()):
                assert count_punctuation_outside_strings(raw, 10**9) == counted(value)
                least, most = counted(value), count_punctuation(raw)
                assert most[0] >= least[0]
                assert most[1] >= least[1]


HEAVY = [
    b"[]",
    b"{}",
    b"[[]]",
    b'{"a":0}',
    b'{"abc":0}',
    b'{"a":{"b":[{}]}}',
    b"300",
    b"1.5",
    b'""',
    b'"abc"',
    b'"\\u20ac"',
    b'"\\ud83d\\ude00"',
    b"[1,2,3]",
    '"a long text with one \U0001f600 in it, and more words"'.encode(),
    b'{"a":1,"b":2,"c":3,"d":4,"e":5,"f":6}',
]


@pytest.mark.parametrize("item", HEAVY, ids=lambda item: item.decode())
def test_no_text_takes_more_memory_than_is_counted(item: bytes) -> None:
    raw = b"[" + b",".join([item] * 20_000) + b"]"
    tracemalloc.start()
    kept = orjson.loads(raw)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept
    # The rest is for the same as text, for the engine.
    assert taken <= parsed_size(raw, 10**9) - len(raw)


def test_text_full_of_commas_is_text() -> None:
    raw = json.dumps({"content": 'a,b:c[d]{e}\\"' * 1000}).encode()
    assert parsed_size(raw, 10) == json_size.parsed_memory(raw, 1, 1)
    with pytest.raises(BadRequest, match="more than 2 values \\(max_values\\)") as refused:
        parsed_size(b"[1,2,3]", 2)
    assert refused.value.status == 413


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_a_text_that_cannot_be_counted_is_refused(encoding: str) -> None:
    """In UTF-16 a letter may hold the byte of a quote: what follows would be a string's."""
    raw = ('{"a":"\u2200","b":[' + ",".join(["{}"] * 100) + "]}").encode(encoding)
    assert len(json.loads(raw)["b"]) == 100, "the routes below /api would read it"
    with pytest.raises(BadRequest, match="not UTF-8") as refused:
        parsed_size(raw, 10)
    assert refused.value.status == 400


def test_a_text_with_a_mark_of_its_order_is_counted() -> None:
    with pytest.raises(BadRequest, match="max_values"):
        parsed_size(b"\xef\xbb\xbf[1,2,3]", 2)


# How many fields a protobuf has


def test_fields_are_counted_in_every_message_of_an_export() -> None:
    """Of this version of OTLP: 10,000 empty fields in each place where there may be a message."""
    filling = b"\x0a\x00" * 10_000
    seen: set[str] = set()

    def look(message: Any, wrapped: Callable[[bytes], bytes]) -> None:
        if message.full_name in seen:
            return
        seen.add(message.full_name)
        assert fields_in(wrapped(filling), 10**6) >= 10_000, message.full_name
        for field in message.fields:
            if field.message_type is not None:
                tag = field.number << 3 | 2
                look(field.message_type, lambda inner, tag=tag: wrapped(ld(tag, inner)))

    look(ExportTraceServiceRequest.DESCRIPTOR, lambda inner: inner)
    assert len(seen) > 10


def ld(tag: int, inner: bytes) -> bytes:
    """A field of bytes."""
    length, coded = len(inner), b""
    while length >= 0x80:
        coded += bytes([length & 0x7F | 0x80])
        length >>= 7
    return bytes([tag]) + coded + bytes([length]) + inner


def one_span(fields: bytes) -> bytes:
    return ld(0x0A, ld(0x12, ld(0x12, fields)))


def test_fields_are_counted_where_they_stand() -> None:
    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add()
    span.name = "n"
    span.start_time_unix_nano = 2**40
    event = span.events.add()
    event.attributes.add().value.array_value.values.add().string_value = "x"
    # Three around the span; name, start and event; attribute, value, array, its value, its text.
    assert fields_in(request.SerializeToString(), 1000) == 3 + 3 + 5


DENSE = {
    "attributes": one_span(ld(0x4A, b"") * 5000),
    "events": one_span(ld(0x5A, b"") * 5000),
    "links": one_span(ld(0x6A, b"") * 5000),
    "attributes of events": one_span(ld(0x5A, ld(0x1A, b"") * 5000)),
    "a list": one_span(ld(0x4A, ld(0x12, ld(0x2A, ld(0x0A, b"") * 5000)))),
    "a map": one_span(ld(0x4A, ld(0x12, ld(0x32, ld(0x0A, b"") * 5000)))),
    "resources": ld(0x0A, b"") * 5000,
    "scopes": ld(0x0A, ld(0x12, b"") * 5000),
    "spans": ld(0x0A, ld(0x12, ld(0x12, b"") * 5000)),
    "of no known kind": one_span(b"\xf8\x01\x00" * 5000),
}


@pytest.mark.parametrize("data", DENSE.values(), ids=DENSE)
def test_what_is_dense_is_refused_before_it_is_parsed(data: bytes) -> None:
    ExportTraceServiceRequest.FromString(data)  # nothing is wrong with it
    assert fields_in(data, 4999) == 5000
    assert 5000 <= fields_in(data, 10**6) <= 5010
    with pytest.raises(BadRequest, match="max_values"):
        export_memory(data + ld(0x12, b"x" * LARGE_BODY_BYTES), PROTOBUF, 4999)


@given(st.binary(max_size=200))
def test_any_bytes_are_counted_or_refused(data: bytes) -> None:
    try:
        export_memory(data + b"\x12\x80\x80\x08" + b"x" * (128 << 10), PROTOBUF, 1000)
    except BadRequest:
        return


def test_spans_as_json_are_weighed_as_json() -> None:
    with pytest.raises(BadRequest, match="max_values"):
        export_memory(b"[1,2,3]", JSON, 2)


# Who gets memory


def budget(total: int = 100, share: int = 60, wait_s: float = 0.01) -> MemoryBudget:
    return MemoryBudget(total, share=share, wait_s=wait_s)


async def test_one_client_cannot_take_it_all() -> None:
    pool = budget()
    greedy, other = pool.lease("greedy"), pool.lease("other")
    await greedy.acquire(60)
    with pytest.raises(Unavailable, match="max_bodies_mib") as full:
        await pool.lease("greedy").acquire(1)
    assert full.value.status == 503
    assert full.value.headers()["retry-after"]
    await other.acquire(40)
    assert pool.free == 0
    greedy.release()
    greedy.release()  # once is enough
    assert pool.free == 60


async def test_what_never_fits_is_refused_at_once() -> None:
    lease = budget(wait_s=1000).lease("a")
    await lease.acquire(50)
    with pytest.raises(BadRequest) as refused:
        await lease.acquire(11)
    assert refused.value.status == 413


async def test_a_body_waits_a_moment_for_memory() -> None:
    pool = budget(wait_s=1000)
    first, second, third = pool.lease("a"), pool.lease("b"), pool.lease("c")
    await first.acquire(60)
    waiting = [asyncio.create_task(second.acquire(50)), asyncio.create_task(third.acquire(50))]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    first.release()
    await asyncio.gather(*waiting)
    assert pool.free == 0


async def test_who_stops_waiting_keeps_nothing() -> None:
    pool = budget(wait_s=1000)
    first = pool.lease("a")
    await first.acquire(60)
    waiting = asyncio.create_task(pool.lease("b").acquire(50))
    granted = asyncio.create_task(pool.lease("c").acquire(50))
    await asyncio.sleep(0)
    waiting.cancel()
    first.release()
    granted.cancel()  # in the same moment in which it gets it
    await asyncio.wait([waiting, granted])
    assert pool.free == 100


LIMITS = RequestSizeLimits(body=1 << 20, api=1 << 10, values=100, memory=4 << 20)


async def read(path: str, parts: list[bytes], *, length: bool = True) -> tuple[bytes, int]:
    """The body as the application gets it, and the bytes that it was asked for in the end."""
    messages: list[Message] = [
        {"type": "http.request", "body": part, "more_body": True} for part in parts
    ]
    messages[-1]["more_body"] = False

    async def receive() -> Message:
        return messages.pop(0)

    size = str(sum(map(len, parts))).encode()
    header = (b"content-length", size) if length else (b"transfer-encoding", b"chunked")
    workers = WorkerThreads()
    bodies = BodyReader(LIMITS, workers)
    lease = bodies.lease("a")
    got = await bodies.read({"path": path, "headers": [header]}, receive, lease)
    message = await got()
    assert not message["more_body"]
    lease.release()
    workers.close()
    return message["body"], len(messages)


@pytest.mark.parametrize("length", [True, False])
async def test_a_body_is_read_as_a_whole(length: bool) -> None:
    assert await read("/v1/x", [b"[1,", b"2]"], length=length) == (b"[1,2]", 0)


@pytest.mark.parametrize(
    ("path", "parts", "setting"),
    [
        ("/v1/x", [b" " * (1 << 20), b" "], "max_body_mib"),
        ("/api/events", [b" " * (1 << 10), b" "], "max_api_body_mib"),
        ("/v1/x", [b"[" + b"1," * 200 + b"1]"], "max_values"),
        ("/api/events", [b"[" + b"1," * 20 + b"1]"], "max_values"),
        ("/v1/x", [b" " * (LARGE_BODY_BYTES + 1), b"[" + b"1," * 200 + b"1]"], "max_values"),
    ],
)
@pytest.mark.parametrize("length", [True, False])
async def test_what_is_too_large_names_its_setting(
    path: str, parts: list[bytes], setting: str, length: bool
) -> None:
    with pytest.raises(BadRequest, match=setting) as refused:
        await read(path, parts, length=length)
    assert refused.value.status == 413


async def test_spans_are_not_weighed_as_json() -> None:
    body, _ = await read(TRACES_PATH, [b"," * 1000])
    assert len(body) == 1000


# Threads


@pytest.mark.parametrize(
    ("size", "elsewhere"), [(LARGE_BODY_BYTES, False), (LARGE_BODY_BYTES + 1, True)]
)
async def test_large_work_is_done_in_a_thread(size: int, elsewhere: bool) -> None:
    import threading

    workers = WorkerThreads()
    name: Callable[[], str] = lambda: threading.current_thread().name  # noqa: E731
    assert ((await workers.run(size, name)) != name()) is elsewhere
    workers.close()
