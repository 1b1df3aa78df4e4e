"""A test that takes `store`, `url` or `empty_url` runs on SQLite and on a real PostgreSQL, unless
`pytest.mark.databases` names some: where what it checks does not depend on the database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.store import postgres_server as postgres
from support.store.empty_stores import PostgreSQLStores, SQLiteStores
from tracegrad import exporter, telemetry
from tracegrad.exporter import EventExporter
from tracegrad.store import Store


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "databases(*names): that a test runs on; without it all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _refuse_vllm(items)
    elsewhere = [item for item in items if _database(item) not in _databases(item)]
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [item for item in items if _database(item) in _databases(item)]


def _refuse_vllm(items: list[pytest.Item]) -> None:
    """`make test` looks for vLLM's and the CLI agents' tests elsewhere only."""
    unit = Path(__file__).parent
    for item in items:
        if unit in item.path.parents and any(map(item.get_closest_marker, ("vllm", "agents"))):
            raise pytest.UsageError(f"{item.nodeid}: belongs into tests/integration")


def _database(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("url") if callspec else None


def _databases(item: pytest.Item) -> tuple[str | None, ...]:
    marker = item.get_closest_marker("databases")
    return (_database(item),) if marker is None else (None, *marker.args)


@pytest.fixture(autouse=True)
def _exporters_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test left undelivered is not tried, and said, within a later one."""
    exporters: dict[str, EventExporter] = {}
    monkeypatch.setattr(exporter, "_exporters", exporters)
    monkeypatch.setattr(telemetry, "_private", {})
    yield
    for each in exporters.values():
        each.shutdown()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    with postgres.running() as server:
        yield server


@pytest.fixture(scope="session")
def sqlite_stores(tmp_path_factory: pytest.TempPathFactory) -> SQLiteStores:
    return SQLiteStores(tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="session")
def postgres_stores(postgres_server: postgres.Server) -> PostgreSQLStores:
    return PostgreSQLStores(postgres_server)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """Of a file that is not there yet."""
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def postgres_url(postgres_stores: PostgreSQLStores) -> Iterator[str]:
    """Of a store without events."""
    url = postgres_stores.take()
    yield url
    postgres_stores.give_back(url)


@pytest.fixture
def empty_postgres_url(postgres_server: postgres.Server) -> Iterator[str]:
    """Of a database without tables."""
    url = postgres_server.new_database()
    yield url
    postgres_server.drop(url)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a store without events, in each database."""
    found: str = request.getfixturevalue(f"{request.param}_url")
    if request.param == "sqlite":
        stores: SQLiteStores = request.getfixturevalue("sqlite_stores")
        stores.put(tmp_path / "store.db")
    return found


@pytest.fixture(params=["sqlite", "empty_postgres"])
def empty_url(request: pytest.FixtureRequest) -> str:
    """Of a place for a store, in each database."""
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened
