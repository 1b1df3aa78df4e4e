"""Spans that came before anybody knew whose they were; what is asked about traces."""

from __future__ import annotations

from functools import partial

from support.store.events import make_span, make_turn
from tracegrad.store import Store

TRACE, OTHER = "a" * 32, "b" * 32
span = partial(make_span, trace_id=TRACE)


def names(store: Store, rollout_id: str) -> list[str]:
    return [each.name for each in store.spans(rollout_id)]


def test_earlier_spans_of_a_trace_join_its_rollout(store: Store) -> None:
    store.append([span(1), span(2, trace_id=OTHER)])
    store.append([span(3, "r1")])
    assert names(store, "r1") == ["s1", "s3"]
    store.append([span(4), span(5, "r1")])
    assert names(store, "r1") == ["s1", "s3", "s4", "s5"]
    assert store.rollouts_of_traces([TRACE, OTHER, "c" * 32]) == [(TRACE, "r1")]


def test_spans_around_several_rollouts_stay_nobodys(store: Store) -> None:
    store.append([span(1, "r1"), span(2, "r2")])
    store.append([span(3)])
    store.append([span(4, "r1")])
    assert names(store, "r1") == ["s1", "s4"]
    assert names(store, "r2") == ["s2"]
    assert sorted(store.rollouts_of_traces([TRACE])) == [(TRACE, "r1"), (TRACE, "r2")]


def test_a_span_that_has_a_rollout_keeps_it(store: Store) -> None:
    store.append([span(1, "r1")])
    store.append([span(1, "r2")])
    assert (names(store, "r1"), names(store, "r2")) == (["s1"], [])


def test_turns_are_asked_for_by_their_spans_and_order(store: Store) -> None:
    one = make_turn("t1", "r1", parent_span_id="0a")
    two = make_turn("t2", "r1", parent_span_id="0b", dialect="otel")
    store.append([one, two, make_turn("t3", "r1"), make_turn("t4", "r2")])
    assert store.calling_spans("r1", except_dialect="otel") == ["0a"]
    assert store.turn_order("r1") == ["t1", "t2", "t3"]
    assert store.rollout_of_turn("t4") == "r2"
    assert store.rollout_of_turn("t5") is None
