"""Heads of requests that no library would send: served, or refused in the dialect's own shape."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.raw_calls import CHAT, CLAUDE, GEMINI, READ, RawCall
from support.proxy.raw_http import Answer, Reader, connect

VOICES = [CHAT, CLAUDE, GEMINI]  # one of each vendor's


def send(rig: ProxyWithEngine, call: RawCall, *, head: bytes = b"", path: bytes = b"") -> Answer:
    """The call with more in its head; within the time that `connect` gives it."""
    body = json.dumps(call.body).encode()
    where = path or call.path.encode()
    first = b"POST " + where + b" HTTP/1.1\r\nhost: localhost\r\n"
    with connect(rig.url) as client:
        client.sendall(first + b"content-length: %d\r\n" % len(body) + head + b"\r\n" + body)
        answer = Reader(client).answer()
    assert answer is not None
    return answer


def served_or_refused(call: RawCall, answer: Answer) -> None:
    if answer.status != 200:
        assert 400 <= answer.status < 500, answer
        assert answer.headers["content-type"] == "application/json"
        assert call.refusal(answer.body).message


HEADS = {
    "a count that is no number": b"x-stainless-retry-count: two",
    "a count in another script": b"x-stainless-retry-count: \xb2",
    "a count of 5,000 digits": b"x-stainless-retry-count: " + b"9" * 5000,
    "a count below nothing": b"x-stainless-retry-count: -1",
    "no key": b"authorization:",
    "half a key": b"authorization: Bearer",
    "a key of bytes": b"authorization: Bearer \xff\xfe",
    "another scheme": b"authorization: Basic \xe9",
    "keys everywhere": b"authorization: a\r\nx-api-key: \xff\r\nx-goog-api-key: b\r\nx-api-key: c",
    "a trace of bytes": b"traceparent: " + b"\xff" * 60,
    "a trace of zeros": b"traceparent: 00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01",
    "baggage without sense": b"baggage: ;;;,,,=tracegrad.rollout,=",
    "another type": b"content-type: text/html; charset=utf-16",
    "a type of bytes": b"content-type: \xff\xfe",
    "an unknown encoding": b"content-encoding: br, gzip, \xff",
    "what it expects is odd": b"expect: the unexpected",
    "a date of bytes": b"date: \xff\r\nif-none-match: *\r\nrange: bytes=5-1",
    "the same header 100 times": b"\r\n".join([b"x-a: b"] * 100),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("call", VOICES, ids=str)
def test_an_odd_header_is_no_reason_to_refuse_a_call(
    patient: ProxyWithEngine, call: RawCall, head: bytes
) -> None:
    assert send(patient, call, head=head + b"\r\n").status == 200


NAMELESS = {
    "a rollout of bytes": b"x-tracegrad-rollout: \xff\xfe",
    "a rollout with a blank": b"x-tracegrad-rollout: a b",
    "a long rollout": b"x-tracegrad-rollout: " + b"a" * 129,
    "a key of bytes": b"authorization: Bearer tg-\xff",
    "a long key": b"authorization: Bearer tg-" + b"a" * 2000,
    "escaped bytes in the baggage": b"baggage: tracegrad.rollout=%ff%fe",
}


@pytest.mark.parametrize("head", NAMELESS.values(), ids=NAMELESS)
@pytest.mark.parametrize("call", VOICES, ids=str)
def test_a_rollout_that_cannot_be_is_refused_by_name(
    patient: ProxyWithEngine, call: RawCall, head: bytes
) -> None:
    answer = send(patient, call, head=head + b"\r\n")
    assert answer.status == 400
    assert "is no rollout id" in call.refusal(answer.body).message


@pytest.mark.parametrize("call", VOICES, ids=str)
@pytest.mark.parametrize("rollout", [b"%00", b"%ff", b"%0a", b"%20", b"a" * 129, "ä".encode()])
def test_a_rollout_in_the_path_that_cannot_be_is_refused(
    patient: ProxyWithEngine, call: RawCall, rollout: bytes
) -> None:
    path = b"/rollouts/" + rollout + call.path.encode()
    answer = send(patient, call, path=path)
    assert 400 <= answer.status < 500
    if b"\xc3" not in rollout:  # those are not HTTP's own characters: nobody knows the path then
        assert call.refusal(answer.body).message


QUERIES = {
    "escaped bytes": b"?%ff=%fe",
    "half an escape": b"?a=%",
    "nothing but signs": b"?&&==;;",
    "2,000 fields": b"?" + b"a&" * 2000,
    "a field twice": b"?alt=sse&alt=json",
}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
@pytest.mark.parametrize("call", READ, ids=str)
def test_an_odd_query_is_served_or_refused(
    patient: ProxyWithEngine, call: RawCall, query: bytes
) -> None:
    served_or_refused(call, send(patient, call, path=call.path.encode() + query))


FIELDS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                b"authorization",
                b"x-api-key",
                b"x-goog-api-key",
                b"x-tracegrad-rollout",
                b"x-tracegrad-key",
                b"x-stainless-retry-count",
                b"traceparent",
                b"baggage",
                b"anthropic-version",
                b"accept",
                b"content-type",
                b"content-encoding",
                b"cookie",
            ]
        ),
        # What a field of HTTP/1.1 may have in it.
        st.lists(st.sampled_from([*range(0x20, 0x7F), *range(0x80, 0x100), 0x09]), max_size=40).map(
            bytes
        )
        | st.sampled_from([b"Bearer tg-r", b"tracegrad.rollout=r", b"1", b"Bearer "]),
    ),
    max_size=6,
)


@pytest.mark.parametrize("call", VOICES, ids=str)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(fields=FIELDS)
def test_any_headers_are_served_or_refused(
    patient: ProxyWithEngine, call: RawCall, fields: list[tuple[bytes, bytes]]
) -> None:
    head = b"".join(name + b": " + value + b"\r\n" for name, value in fields)
    served_or_refused(call, send(patient, call, head=head))
