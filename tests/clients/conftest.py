"""Clients that people use, against the real proxy on a loopback port and a scripted engine."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.engines.lenient_engine import LenientEngine
from support.engines.mock_engine import MockEngine
from support.engines.prompt_driven_engine import PromptDrivenEngine
from support.proxy.concurrent_stream import concurrent_stream
from support.proxy.proxy_with_engine import ProxyWithEngine, proxy_with_engine
from support.proxy.servers import EngineServer, serving
from tracegrad.store import Store


@pytest.fixture(scope="session")
def engine_server() -> Iterator[EngineServer]:
    server = EngineServer()
    with serving(server, lifespan="off") as server.url:
        yield server


@pytest.fixture(scope="session")
def new_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Paths of stores whose tables are there: migrating takes longer than most tests."""
    folder = tmp_path_factory.mktemp("stores")
    empty = folder / "empty.db"
    Store.open(f"sqlite:///{empty}").close()
    count = 0

    def copy() -> Path:
        nonlocal count
        count += 1
        return Path(shutil.copy(empty, folder / f"store-{count}.db"))

    return copy


@pytest.fixture
def engine() -> MockEngine:
    return PromptDrivenEngine()


@pytest.fixture(scope="session")
def standing(
    engine_server: EngineServer, new_store: Callable[[], Path]
) -> Iterator[ProxyWithEngine]:
    """One proxy for all tests that need no other."""
    with proxy_with_engine(engine_server, MockEngine(), new_store()) as rig:
        yield rig


@pytest.fixture(scope="module")
def patient(
    engine_server: EngineServer, new_store: Callable[[], Path]
) -> Iterator[ProxyWithEngine]:
    """One before an engine that takes anything, and streams meanwhile."""
    with (
        proxy_with_engine(engine_server, LenientEngine(), new_store()) as rig,
        concurrent_stream(rig),
    ):
        yield rig


@pytest.fixture
def rig(
    engine_server: EngineServer, engine: MockEngine, standing: ProxyWithEngine
) -> ProxyWithEngine:
    """The standing proxy with the test's own engine and rollout."""
    engine_server.engine = engine
    return replace(standing, engine=engine, rollout_id=f"r-{uuid.uuid4().hex[:8]}")
