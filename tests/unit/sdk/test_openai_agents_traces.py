"""Whether the Agents SDK still has its exporter, on modules as it has them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tracegrad.openai_agents_traces import exports_to_its_vendor


def of_module(name: str, module: str, **attributes: Any) -> Any:
    return type(name, (), {"__module__": module, **attributes})()


def provider(*processors: Any, disabled: bool | None = None) -> Any:
    return of_module(
        "DefaultTraceProvider",
        "agents.tracing.provider",
        _manual_disabled=disabled,
        _multi_processor=SimpleNamespace(_processors=processors),
    )


EXPORTER = SimpleNamespace(_exporter=of_module("BackendSpanExporter", "agents.tracing.processors"))
ANOTHER = SimpleNamespace(_exporter=of_module("ConsoleSpanExporter", "agents.tracing.processors"))


@pytest.mark.parametrize(
    ("found", "exports"),
    [
        (None, True),
        (provider(EXPORTER), True),
        (provider(ANOTHER, EXPORTER), True),
        (provider(ANOTHER, object()), False),
        (provider(), False),
        (provider(EXPORTER, disabled=True), False),
        (provider(EXPORTER, disabled=False), True),
        (of_module("Mine", "agent"), False),
        (of_module("DefaultTraceProvider", "agents.tracing.provider"), True),
    ],
)
def test_its_exporter(monkeypatch: pytest.MonkeyPatch, found: Any, exports: bool) -> None:
    setup = ModuleType("agents.tracing.setup")
    setup.__dict__["GLOBAL_TRACE_PROVIDER"] = found
    monkeypatch.setitem(sys.modules, "agents.tracing.setup", setup)
    assert exports_to_its_vendor() is exports


def test_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "agents.tracing.setup", raising=False)
    assert exports_to_its_vendor()
