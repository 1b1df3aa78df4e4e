"""The real proxy under uvicorn on a loopback port, a real store, a mock engine behind; and, for
tests of the upstreams alone, plain engines and providers that do as the test says."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.engines.mock_engine import MockEngine
from support.engines.raw_http_engine import RawHttpEngine
from support.proxy.litellm_provider import Provider, Teacher
from support.proxy.proxy_with_engine import ProxyWithEngine, ServeProxy, served_proxy
from support.proxy.servers import CONTROL_KEY, EngineServer, HeldWriter, serving
from support.proxy.upstream_pool import Pool
from tracegrad.events import Turn
from tracegrad.proxy.engine.upstreams import UpstreamPool
from tracegrad.proxy.engine.upstreams.litellm import LiteLLMUpstream
from tracegrad.store import GroupCommitWriter, Store


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
    with GroupCommitWriter(store) as writer:
        held = HeldWriter(writer)
        yield held
        held.release()


@pytest.fixture
def proxy(engine_url: str, store: Store, writer: HeldWriter) -> Iterator[str]:
    settings = {"upstream": engine_url, "control_key": CONTROL_KEY}
    with served_proxy(store, writer, **settings) as client:
        yield str(client.base_url).rstrip("/")


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


@pytest.fixture
def serve_proxy(engine_url: str, store: Store, writer: HeldWriter) -> ServeProxy:
    return partial(served_proxy, store, writer, upstream=engine_url)


@pytest.fixture
def rig(
    proxy: str, engine_url: str, engine: MockEngine, store: Store, writer: HeldWriter
) -> Iterator[ProxyWithEngine]:
    """The fixtures above as one, for the tests of rollout "r1"."""
    rig = ProxyWithEngine(proxy, engine_url, engine, store, writer)
    yield rig
    rig.close_clients()


# Upstreams without a proxy


@pytest.fixture
async def engines() -> AsyncIterator[list[RawHttpEngine]]:
    started = [await RawHttpEngine().start() for _ in range(2)]
    yield started
    for engine in started:
        engine.kill()


@pytest.fixture
async def pool(engines: list[RawHttpEngine]) -> AsyncIterator[Pool]:
    """Makes an open pool of the first `count` engines."""
    async with AsyncExitStack() as stack:

        def make(count: int = 1, **options: object) -> UpstreamPool:
            made = UpstreamPool([e.url for e in engines[:count]], **options)  # type: ignore[arg-type]
            made.open()
            stack.push_async_callback(made.close)
            return made

        yield make


@pytest.fixture(params=["openai", "anthropic"])
async def provider(request: pytest.FixtureRequest) -> AsyncIterator[Provider]:
    engine = await RawHttpEngine().start()
    yield Provider(request.param, engine)
    engine.kill()


@pytest.fixture
async def teacher(provider: Provider) -> AsyncIterator[Teacher]:
    opened: list[LiteLLMUpstream] = []

    def make(**options: Any) -> LiteLLMUpstream:
        made = LiteLLMUpstream(api_base=provider.api_base, api_key="provider-key", **options)
        made.open()
        opened.append(made)
        return made

    yield make
    for made in opened:
        await made.close()
