"""A rollout that DSPy answered from its cache is warned of, once."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from support.sdk.fake_proxy import FakeProxy
from tracegrad import dspy_cache, rollout


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


def test_a_hit_is_said_once(history: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    with rollout("t"):
        history.append(entry(hit=False))
    assert said(caplog) == []
    for _ in range(2):
        with rollout("t"):
            history.append(entry(hit=True))
    [warning] = said(caplog)
    assert "cache=False" in warning


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
