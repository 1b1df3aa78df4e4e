from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from sdk_server import FakeProxy, serve

from tracegrad import client, telemetry


@pytest.fixture(autouse=True)
def _outboxes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for what another one left undelivered."""
    monkeypatch.setattr(client, "_outboxes", {})
    monkeypatch.setattr(telemetry, "_private", {})


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeProxy]:
    """A running stand-in that TRACEGRAD_URL leads to; the working directory is empty."""
    fake, server = serve()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACEGRAD_URL", fake.url)
    monkeypatch.delenv("TRACEGRAD_TAGS", raising=False)
    monkeypatch.delenv("TRACEGRAD_API_KEY", raising=False)
    yield fake
    client.flush(5)
    server.shutdown()
    server.server_close()


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on, below those that the system hands out to clients.

    One of the latter may be handed to the very client that calls it, which then talks to itself.
    """
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no free port among a hundred")
