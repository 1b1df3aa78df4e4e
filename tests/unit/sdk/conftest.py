from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.sdk.fake_proxy import FakeProxy, serve
from tracegrad import exporter
from tracegrad_trainer.utils.network import find_free_port


@pytest.fixture(autouse=True)
def journals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where this test's journals are."""
    monkeypatch.setenv("TRACEGRAD_JOURNAL", str(tmp_path / "journal"))
    return tmp_path / "journal"


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
