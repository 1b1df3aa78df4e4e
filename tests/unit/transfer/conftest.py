from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.store import postgres_server
from support.store.empty_stores import PostgreSQLStores, SQLiteStores
from support.transfer.random_stores import NewStore
from tracegrad.store import Store


@pytest.fixture(scope="session")
def postgres_stores() -> Iterator[PostgreSQLStores]:
    with postgres_server.running() as server:
        yield PostgreSQLStores(server)


@pytest.fixture(scope="session")
def sqlite_stores(tmp_path_factory: pytest.TempPathFactory) -> SQLiteStores:
    return SQLiteStores(tmp_path_factory.mktemp("stores"))


@pytest.fixture
def new_store(
    request: pytest.FixtureRequest, sqlite_stores: SQLiteStores, tmp_path: Path
) -> Iterator[NewStore]:
    """An empty one in "sqlite" or "postgres", each time it is called."""
    opened: list[Store] = []
    servers: list[tuple[PostgreSQLStores, str]] = []

    def new(database: str) -> Store:
        if database == "sqlite":
            path = tmp_path / f"store-{len(opened)}.db"
            sqlite_stores.put(path)
            url = f"sqlite:///{path}"
        else:
            stores: PostgreSQLStores = request.getfixturevalue("postgres_stores")
            servers.append((stores, url := stores.take()))
        opened.append(Store.open(url))
        return opened[-1]

    yield new
    for store in opened:
        store.close()
    for stores, url in servers:
        stores.give_back(url)


@pytest.fixture
def store(new_store: NewStore) -> Store:
    return new_store("sqlite")
