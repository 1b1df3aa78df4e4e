"""The order in which the places that name a rollout count, and what a trace may say."""

from __future__ import annotations

import pytest

from tracegrad.proxy.auth.rollout_attribution import CallOwner, TraceIndex, attribute_call
from tracegrad.proxy.http.errors import BadRequest

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def traces() -> TraceIndex:
    known = TraceIndex()
    known.add(TRACE, "trace")
    return known


def test_the_first_name_wins(traces: TraceIndex) -> None:
    everything = {
        "x-tracegrad-rollout": "header",
        "baggage": "a=b, tracegrad.rollout=bag%2Dgage;x=y",
        "traceparent": PARENT,
    }
    named = CallOwner("path", TRACE, SPAN, is_named=True)
    assert attribute_call(everything, "path", "key", traces) == named
    assert attribute_call(everything, None, "key", traces).rollout_id == "header"
    del everything["x-tracegrad-rollout"]
    assert attribute_call(everything, None, "key", traces).rollout_id == "key"
    assert attribute_call(everything, None, None, traces).rollout_id == "bag-gage"
    del everything["baggage"]
    assert attribute_call(everything, None, None, traces) == CallOwner("trace", TRACE, SPAN)
    assert attribute_call(everything, None, None, TraceIndex()) == CallOwner(None, TRACE, SPAN)
    assert attribute_call({}, None, None, traces) == CallOwner(None)


@pytest.mark.parametrize("name", ["a b", "x/y", "ü", "a" * 129, "r1\n"])
def test_an_impossible_name_is_refused(traces: TraceIndex, name: str) -> None:
    with pytest.raises(BadRequest, match="no rollout id") as caught:
        attribute_call({"x-tracegrad-rollout": name}, None, None, traces)
    assert caught.value.param == "x-tracegrad-rollout"
    with pytest.raises(BadRequest, match="no rollout id"):
        attribute_call({}, name, None, traces)


@pytest.mark.parametrize(
    "traceparent",
    [
        "?",
        f"00-{TRACE}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
    ],
)
def test_a_traceparent_that_is_none_says_nothing(traces: TraceIndex, traceparent: str) -> None:
    assert attribute_call({"traceparent": traceparent}, None, None, traces) == CallOwner(None)


def test_a_trace_around_many_rollouts_says_nothing(traces: TraceIndex) -> None:
    traces.add(TRACE, "trace")
    assert traces.rollout_of(TRACE) == "trace"
    traces.add(TRACE, "another")
    traces.add(TRACE, "trace")
    assert traces.rollout_of(TRACE) is None
    assert attribute_call({"traceparent": PARENT}, None, None, traces) == CallOwner(
        None, TRACE, SPAN
    )


def test_the_traces_seen_last_are_known() -> None:
    traces = TraceIndex(limit=2)
    for trace in ("a", "b", "a", "c"):
        traces.add(trace, f"of {trace}")
    traces.add("d", None)
    traces.add(None, "x")
    assert [traces.rollout_of(trace) for trace in "abcd"] == ["of a", None, "of c", None]
