"""The real proxy under uvicorn on a loopback port, a real store, a mock engine behind."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.mock_engine import MockEngine
from support.proxy_rig import EngineServer, HeldWriter, serving
from tracegrad.proxy import create_app
from tracegrad.records import Turn
from tracegrad.settings import ProxySettings
from tracegrad.store import Store, Writer


@pytest.fixture(scope="session")
def engine_server() -> Iterator[EngineServer]:
    server = EngineServer()
    with serving(server, lifespan="off") as server.url:
        yield server


@pytest.fixture
def engine(engine_server: EngineServer) -> MockEngine:
    engine_server.engine = MockEngine()
    return engine_server.engine


@pytest.fixture
def engine_url(engine_server: EngineServer, engine: MockEngine) -> str:
    return engine_server.url


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose tables are there, to copy: migrating takes longer than most tests."""
    path = tmp_path_factory.mktemp("store") / "empty.db"
    Store.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def store(tmp_path: Path, empty_store: Path) -> Iterator[Store]:
    shutil.copy(empty_store, tmp_path / "store.db")
    with Store.open(f"sqlite:///{tmp_path}/store.db") as store:
        yield store


@pytest.fixture
def writer(store: Store) -> Iterator[HeldWriter]:
    with Writer(store) as writer:
        held = HeldWriter(writer)
        yield held
        held.release()


@pytest.fixture
def proxy(engine_url: str, store: Store, writer: HeldWriter) -> Iterator[str]:
    with serving(create_app(ProxySettings(upstream=engine_url), store=store, writer=writer)) as url:
        yield url


@pytest.fixture
def http(proxy: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=proxy, timeout=20) as client:
        yield client


@pytest.fixture
def client(proxy: str) -> Iterator[openai.OpenAI]:
    """As the agent of rollout "r1" has it: the key names the rollout."""
    with openai.OpenAI(base_url=f"{proxy}/v1", api_key="tg-r1", max_retries=0, timeout=20) as c:
        yield c


@pytest.fixture
def turns(store: Store) -> Callable[..., list[Turn]]:
    """The recorded turns of a rollout."""

    def read(rollout_id: str = "r1") -> list[Turn]:
        return store.rollout_turns(rollout_id)

    return read
