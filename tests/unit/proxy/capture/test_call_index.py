"""What is remembered of calls by their ids is bounded, by what the cache may take."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from support.proxy.servers import HeldWriter
from tracegrad.proxy import app, create_app
from tracegrad.proxy.capture.call_index import CallIndex
from tracegrad.proxy.config import ProxySettings
from tracegrad.store import Store


def test_the_last_calls_are_remembered() -> None:
    index = CallIndex(10)
    for number in range(100):
        index.rollout_called(f"rollout-{number}")
        index.call_started("trace", f"span-{number}")
    known = [n for n in range(100) if index.was_called(f"rollout-{n}")]
    inside = [n for n in range(100) if index.has_call_inside("trace", f"span-{n}")]
    assert known == inside == list(range(90, 100))


def test_of_rollouts_fewer_are_remembered() -> None:
    index = CallIndex(10, rollouts=3)
    for number in range(100):
        index.rollout_called(f"rollout-{number}")
        index.call_ended(f"rollout-{number}", failed=True)
        index.call_started("trace", f"span-{number}")
    names = [f"rollout-{number}" for number in range(100)]
    assert list(filter(index.was_called, names)) == names[97:]
    assert list(filter(index.last_failed, names)) == names[97:]
    assert sum(index.has_call_inside("trace", f"span-{n}") for n in range(100)) == 10


@pytest.mark.parametrize(("cache_mib", "calls"), [(1, 500), (16, 8_000), (100, 50_000)])
def test_a_small_cache_remembers_fewer(
    cache_mib: int, calls: int, store: Store, writer: HeldWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert remembered(store, writer, monkeypatch, cache_mib=cache_mib) == calls


def test_by_default_as_many_as_ever(
    store: Store, writer: HeldWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert remembered(store, writer, monkeypatch) == 50_000


def remembered(
    store: Store, writer: HeldWriter, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> int:
    given: list[int] = []

    def recorder(make: Any, *args: Any, **named: Any) -> Any:
        given.append(named["remembered"])
        return make(*args, **named)

    monkeypatch.setattr(app, "Recorder", partial(recorder, app.Recorder))
    create_app(ProxySettings(upstream="http://127.0.0.1:1", **settings), store=store, writer=writer)
    return given[0]
