"""AG2's own middleware in each of its agents, on a stand-in of its two modules."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tracegrad import ag2_spans
from tracegrad.ag2_spans import hand_to_agents


class Middleware:
    def __init__(self, *, agent_name: str, tracer_provider: object = None) -> None:
        self.agent_name, self.tracer_provider = agent_name, tracer_provider


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Agent:
        def __init__(self, name: str, *, middleware: tuple[object, ...] = ()) -> None:
            """Of AG2."""
            self.name = name
            self._middleware = list(middleware)

        @property
        def middleware(self) -> tuple[SimpleNamespace, ...]:
            return tuple(SimpleNamespace(middleware=each) for each in self._middleware)

        def insert_middleware(self, middleware: object) -> None:
            self._middleware.insert(0, middleware)

    package, inner = ModuleType("ag2"), ModuleType("ag2.middleware")
    package.__dict__["Agent"], inner.__dict__["TelemetryMiddleware"] = Agent, Middleware
    monkeypatch.setitem(sys.modules, "ag2", package)
    monkeypatch.setitem(sys.modules, "ag2.middleware", inner)
    return Agent


def test_each_agent_has_it_once_and_outermost(agent: Any) -> None:
    before, other = agent("before"), object()
    hand_to_agents("provider")
    hand_to_agents("another")
    assert before.middleware == ()
    spans, kept = (each.middleware for each in agent("forecaster", middleware=(other,)).middleware)
    assert (spans.agent_name, spans.tracer_provider) == ("forecaster", "provider")
    assert kept is other
    assert agent.__init__.__doc__ == "Of AG2."


def test_one_that_has_it_keeps_its_own_alone(agent: Any) -> None:
    hand_to_agents("provider")
    own = Middleware(agent_name="mine")
    assert [each.middleware for each in agent("a", middleware=(own,)).middleware] == [own]


def test_another_version_of_ag2_is_a_warning(
    agent: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hand_to_agents("provider")
    monkeypatch.delattr(agent, "insert_middleware")
    monkeypatch.setattr(ag2_spans, "_said", False)
    for _ in range(2):
        assert agent("forecaster").name == "forecaster"
    [record] = caplog.records
    assert record.getMessage().startswith("agents of AG2 make no spans: AttributeError")
