"""A rollout that DSPy answered from its cache is warned of, once."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from support.sdk.fake_proxy import FakeProxy
from tracegrad import call_check, dspy_cache, flush, rollout


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch, proxy: FakeProxy) -> list[Any]:
    base_lm = ModuleType("dspy.clients.base_lm")
    found: list[Any] = []
    base_lm.__dict__["GLOBAL_HISTORY"] = found
    monkeypatch.setitem(sys.modules, "dspy.clients.base_lm", base_lm)
    monkeypatch.setattr(dspy_cache, "_warned", False)
    return found


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "DSPy" in r.getMessage()]


def entry(hit: bool) -> dict[str, Any]:
    return {"response": SimpleNamespace(cache_hit=hit)}


def native(hit: bool, *, counted: bool = True, n: int = 1) -> dict[str, Any]:
    """Of DSPy's own engine: a response has no mark, and its usage even where it was cached."""
    usage = SimpleNamespace(input_tokens=3, output_tokens=5)
    if not counted:
        usage = SimpleNamespace(input_tokens=None, output_tokens=None)
    responses = (SimpleNamespace(usage=usage),) * n
    used = {"prompt_tokens": 3, "completion_tokens": 5} if counted and not hit else {}
    return {"response": responses[0] if n == 1 else responses, "usage": used}


def test_a_hit_is_said_once(history: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    with rollout("t"):
        history.append(entry(hit=False))
    assert said(caplog) == []
    for _ in range(2):
        with rollout("t"):
            history.append(entry(hit=True))
    [warning] = said(caplog)
    assert "cache=False" in warning


@pytest.mark.parametrize("n", [1, 2])
def test_a_hit_of_its_own_engine_shows_in_what_was_used(
    history: list[Any], caplog: pytest.LogCaptureFixture, n: int
) -> None:
    with rollout("t"):
        history.append(native(hit=False, n=n))
    with rollout("t"):
        history.append(native(hit=False, counted=False, n=n))  # nothing can be said
    assert said(caplog) == []
    with rollout("t"):
        history.extend([native(hit=True, n=n), native(hit=False, n=n)])
    assert len(said(caplog)) == 1


def test_a_hit_is_found_before_many_calls(
    history: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with rollout("t"):
        history.extend([entry(hit=True), *[entry(hit=False)] * (dspy_cache.LOOKED_AT - 1)])
    assert len(said(caplog)) == 1


def test_one_without_calls_is_told_of_the_cache_alone(
    history: list[Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_check, "_SPAN_EXPORTERS", ())  # of another test's
    for _ in range(2):
        with rollout("t") as r:
            r.reward(1.0)
            history.append(native(hit=True))
    assert flush(60)
    assert len(said(caplog)) == 1
    assert "no LLM call" not in caplog.text
    with rollout("t") as r:
        r.reward(1.0)
    assert flush(60)
    assert "no LLM call" in caplog.text


def test_what_was_cached_before_the_rollout_is_not_its_own(
    history: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    history.append(entry(hit=True))
    with rollout("t"):
        pass
    with rollout("t"):
        history.append(entry(hit=False))
    assert said(caplog) == []
    with rollout("t"):
        del history[:]  # as DSPy drops old entries
        history.extend([entry(hit=True), entry(hit=False)])
    assert len(said(caplog)) == 1


def test_what_is_compared_with_nothing_may_be_cached(
    history: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with rollout():
        history.append(entry(hit=True))
    with rollout("t", held_out=True):
        history.append(entry(hit=True))
    assert said(caplog) == []


def test_another_versions_history_disturbs_nobody(
    history: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rollout("t"):
        history.append("a line")
    monkeypatch.setitem(sys.modules["dspy.clients.base_lm"].__dict__, "GLOBAL_HISTORY", 3)
    with rollout("t"):
        pass
    assert said(caplog) == []
