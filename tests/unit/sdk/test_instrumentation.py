"""`tracegrad.instrument()` on distributions that a test makes: what it finds, turns on and says."""

from __future__ import annotations

import logging
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tracegrad
from support.sdk.fake_distributions import put_distribution
from support.sdk.fake_proxy import FakeProxy
from tracegrad import instrumentation, telemetry
from tracegrad.frameworks import FRAMEWORKS, by_name

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution there, as `put_distribution` does."""
    standard = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *standard])
    monkeypatch.setattr(instrumentation, "_said", set())

    yield partial(put_distribution, tmp_path)
    for module in [name for name in sys.modules if name.startswith("fake_o")]:
        del sys.modules[module]


def instrumentor(name: str) -> type:
    module = f"fake_{name.replace('-', '_')}"
    found: type = sys.modules[module].Instrumentor
    return found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tracegrad"]


def test_nothing_is_installed(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    assert tracegrad.instrument() == []
    assert warnings(caplog) == []


def test_the_first_of_two_instrumentors_is_turned_on_once(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("smolagents")
    install("opentelemetry-instrumentation-genai-smolagents", "smolagents")
    install("openinference-instrumentation-smolagents", "smolagents")
    assert tracegrad.instrument() == ["smolagents"]
    assert tracegrad.instrument("smolagents") == ["smolagents"]
    assert len(instrumentor("openinference-instrumentation-smolagents").calls) == 1
    other = "fake_opentelemetry_instrumentation_genai_smolagents"
    assert not [name for name in sys.modules if name.startswith(other)]
    assert warnings(caplog) == []


def test_the_one_that_the_agent_turned_on_stays_the_only_one(install: Install) -> None:
    install("smolagents")
    install("openinference-instrumentation-smolagents", "smolagents")
    theirs = "opentelemetry-instrumentation-genai-smolagents"
    install(theirs, "smolagents")
    __import__(f"fake_{theirs.replace('-', '_')}")
    instrumentor(theirs)().instrument(TracerProvider())
    assert tracegrad.instrument() == ["smolagents"]
    ours = "fake_openinference_instrumentation_smolagents"
    assert not [name for name in sys.modules if name.startswith(ours)]


def test_what_is_missing_is_said_once_with_its_pip_line(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("dspy")
    assert tracegrad.instrument() == []
    assert tracegrad.instrument() == []
    assert warnings(caplog) == [
        "DSPy is installed, and nothing that makes spans of it: pip install"
        " openinference-instrumentation-dspy. Its LLM calls are recorded all the same"
    ]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise RuntimeError('no such attribute')", "RuntimeError: no such attribute"),
        ("return None", "it did not say why"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_broken_instrumentor_is_a_warning(
    install: Install, caplog: pytest.LogCaptureFixture, body: str, why: str
) -> None:
    install("dspy")
    install("openinference-instrumentation-dspy", "dspy", body)
    install("smolagents")
    install("openinference-instrumentation-smolagents", "smolagents")
    assert tracegrad.instrument() == ["smolagents"]
    assert warnings(caplog) == [
        f"openinference-instrumentation-dspy 1.5 does not work with DSPy 1.5: {why}. Try pip"
        " install -U openinference-instrumentation-dspy dspy; LLM calls are recorded all the same"
    ]


def test_a_broken_framework_is_a_warning(
    install: Install, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pydantic_ai", None)
    install("pydantic-ai-slim")
    assert tracegrad.instrument() == []
    [said] = warnings(caplog)
    assert said.startswith("Pydantic AI could not be instrumented: ")


def test_clients_are_left_alone_beside_a_framework(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("openai")
    install("openinference-instrumentation-openai", "openai")
    assert tracegrad.instrument() == ["openai"]
    install("smolagents")
    install("openinference-instrumentation-smolagents", "smolagents")
    assert tracegrad.instrument() == ["smolagents"]
    assert tracegrad.instrument("openai") == ["openai"]
    assert warnings(caplog) == []


def test_an_addon_is_on_beside_what_makes_spans_and_is_none_of_them(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("mcp")
    assert tracegrad.instrument() == []
    assert warnings(caplog) == []
    assert tracegrad.instrument("mcp") == []
    assert warnings(caplog) == [
        "MCP is installed, and nothing that carries the context of spans through it: pip install"
        " openinference-instrumentation-mcp"
    ]
    caplog.clear()
    install("openinference-instrumentation-mcp", "mcp")
    install("smolagents")
    install("openinference-instrumentation-smolagents", "smolagents")
    assert tracegrad.instrument("smolagents") == ["smolagents"]
    assert "fake_openinference_instrumentation_mcp" not in sys.modules
    assert tracegrad.instrument() == ["smolagents"]
    assert instrumentor("openinference-instrumentation-mcp")().is_instrumented_by_opentelemetry
    assert warnings(caplog) == []


def test_names(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"instrument\('langgraf'\): .* give one of ag2, "):
        tracegrad.instrument("langgraf")
    assert tracegrad.instrument("langgraph") == []
    assert warnings(caplog) == [
        "instrument('langchain'): LangChain and LangGraph is not installed here: pip install"
        " langchain-core"
    ]


def test_what_the_environment_forbids(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install("openai-agents")
    install("openinference-instrumentation-openai-agents", "openai_agents")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    assert tracegrad.instrument() == ["openai-agents"]
    assert warnings(caplog) == [
        "OPENAI_AGENTS_DISABLE_TRACING=1 turns all spans of OpenAI Agents SDK off: unset it"
    ]
    monkeypatch.setenv("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "openai_agents, other")
    assert tracegrad.instrument() == []


CREWAI_TELEMETRY = (
    "CrewAI sends telemetry to its vendor: set CREWAI_DISABLE_TELEMETRY=true before it is imported"
)
CREWAI_TRACES = (
    "CrewAI sends the traces of runs, once that was agreed to, to its vendor: set"
    " CREWAI_TRACING_ENABLED=false"
)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, [CREWAI_TELEMETRY, CREWAI_TRACES]),
        (
            {"CREWAI_DISABLE_TELEMETRY": "false", "CREWAI_TRACING_ENABLED": "true"},
            [CREWAI_TELEMETRY, CREWAI_TRACES],
        ),
        ({"CREWAI_DISABLE_TELEMETRY": "0"}, [CREWAI_TELEMETRY, CREWAI_TRACES]),
        ({"CREWAI_DISABLE_TRACKING": "1"}, [CREWAI_TRACES]),
        ({"CREWAI_TRACING_ENABLED": "False"}, [CREWAI_TELEMETRY]),
        ({"CREWAI_DISABLE_TELEMETRY": "TRUE", "CREWAI_TRACING_ENABLED": "0"}, []),
    ],
)
def test_who_reports_to_its_vendor_is_said(
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    environ: dict[str, str],
    said: list[str],
) -> None:
    [crewai] = [each for each in FRAMEWORKS if each.name == "crewai"]
    for name, _ in [pair for report in crewai.reports for pair in report.unless]:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    install("crewai")
    install("openinference-instrumentation-crewai", "crewai")
    assert tracegrad.instrument() == ["crewai"]
    assert warnings(caplog) == said


def test_a_vendor_is_reported_to_without_an_instrumentor_too(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("OPENAI_AGENTS_DISABLE_TRACING", raising=False)
    install("openai-agents")
    assert tracegrad.instrument() == []
    missing, reports = warnings(caplog)
    assert missing.startswith("OpenAI Agents SDK is installed, and nothing that makes spans of it")
    assert reports.startswith("OpenAI Agents SDK sends its traces to its vendor: pip install")
    assert "OPENAI_AGENTS_DISABLE_TRACING=1" in reports
    caplog.clear()
    monkeypatch.setattr(instrumentation, "_said", {missing})
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    assert tracegrad.instrument() == []
    assert warnings(caplog) == []


def test_its_spans_go_to_the_proxy_and_to_a_provider_that_comes_later(
    install: Install, monkeypatch: pytest.MonkeyPatch, proxy: FakeProxy
) -> None:
    install("smolagents")
    name = "openinference-instrumentation-smolagents"
    install(name, "smolagents")
    assert tracegrad.instrument() == ["smolagents"]
    tracer = instrumentor(name)().tracer
    with tracegrad.rollout("t"), tracer.start_as_current_span("before"):
        pass
    theirs, kept = TracerProvider(), InMemorySpanExporter()
    theirs.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: theirs)
    tracer.start_span("outside").end()
    with tracegrad.rollout("t") as r, tracer.start_as_current_span("after"):
        pass
    names = [span.name for span in kept.get_finished_spans()]
    assert names == ["outside", "after", "rollout"]
    [after] = [span for span in kept.get_finished_spans() if span.name == "after"]
    assert after.attributes is not None
    assert after.attributes["tracegrad.rollout"] == r.id
    assert after.instrumentation_scope is not None
    assert after.instrumentation_scope.name == name
    assert tracegrad.flush(30)
    assert {"before", "after"} <= {span.name for span in proxy.spans()}
    assert "outside" not in {span.name for span in proxy.spans()}


def test_a_framework_that_knows_the_process_s_provider_only(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    monkeypatch.setattr(trace, "set_tracer_provider", given.append)
    install("strands-agents")
    assert tracegrad.instrument() == ["strands"]
    assert given == [], "the agent may still set up its own"
    url = tracegrad.context.proxy_url()
    with tracegrad.rollout("t"):
        assert given == [telemetry.provider_of(url)]
    assert tracegrad.instrument() == ["strands"]
    theirs = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: theirs)
    with tracegrad.rollout("t"):
        assert len(given) == 1
        assert telemetry.provider_of(url) is theirs


def test_each_framework_has_one_name_and_something_to_turn_on() -> None:
    names = [name for each in FRAMEWORKS for name in (each.name, *each.aliases)]
    assert len(names) == len(set(names)) == len(by_name())
    modules = [module for each in FRAMEWORKS for module in each.modules]
    assert len(modules) == len(set(modules))
    for each in FRAMEWORKS:
        assert each.native or each.instrumentors
        assert each.packages
        assert each.modules
    assert logging.getLogger("tracegrad") is instrumentation._log
