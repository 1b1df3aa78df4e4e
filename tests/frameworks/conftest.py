"""A proxy of the test's own, before an engine that says what the test queues."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.engines.prompt_driven_engine import PromptDrivenEngine
from support.proxy.proxy_with_engine import ProxyWithEngine, proxy_with_engine
from support.proxy.servers import EngineServer, serving
from tracegrad.store import Store


@pytest.fixture(scope="session")
def engine_server() -> Iterator[EngineServer]:
    server = EngineServer()
    with serving(server, lifespan="off") as server.url:
        yield server


@pytest.fixture
def proxy(engine_server: EngineServer, tmp_path: Path) -> Iterator[ProxyWithEngine]:
    path = tmp_path / "store.db"
    Store.open(f"sqlite:///{path}").close()
    # As docs/frameworks.md has it served: it spares the examples lines about sampling.
    with proxy_with_engine(engine_server, PromptDrivenEngine(), path, sampling="free") as found:
        yield found
