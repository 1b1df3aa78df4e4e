from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.sdk.fake_proxy import FakeProxy, serve
from tracegrad import exporter, telemetry
from tracegrad.exporter import EventExporter
from tracegrad_trainer.utils.network import find_free_port


@pytest.fixture(autouse=True)
def journals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No test waits for what another one left undelivered; this one's journals are here."""
    exporters: dict[str, EventExporter] = {}
    monkeypatch.setattr(exporter, "_exporters", exporters)
    monkeypatch.setattr(telemetry, "_private", {})
    monkeypatch.setenv("TRACEGRAD_JOURNAL", str(tmp_path / "journal"))
    yield tmp_path / "journal"
    for each in exporters.values():
        each.shutdown()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeProxy]:
    """A running stand-in that TRACEGRAD_URL leads to; the working directory is empty."""
    fake, server = serve()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACEGRAD_URL", fake.url)
    monkeypatch.delenv("TRACEGRAD_TAGS", raising=False)
    monkeypatch.delenv("TRACEGRAD_HELD_OUT", raising=False)
    monkeypatch.delenv("TRACEGRAD_API_KEY", raising=False)
    yield fake
    if (to := exporter._exporters.get(fake.url)) is not None:
        to.flush(5)
    server.shutdown()
    server.server_close()


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on, and none of those that the system hands out to clients: one of
    them may be handed to the very client that calls it, which then talks to itself."""
    return find_free_port()
