from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from support.store.empty_stores import PostgreSQLStores, SQLiteStores
from support.transfer.random_stores import NewStore
from tracegrad.store import Store

_numbers = count()


@pytest.fixture
def new_store(
    request: pytest.FixtureRequest, sqlite_stores: SQLiteStores, tmp_path: Path
) -> Iterator[NewStore]:
    """An empty one in "sqlite" or "postgres", each time it is called."""
    with ExitStack() as opened:

        def new(database: str) -> Store:
            if database == "sqlite":
                path = tmp_path / f"store-{next(_numbers)}.db"
                sqlite_stores.put(path)
                url = f"sqlite:///{path}"
            else:
                stores: PostgreSQLStores = request.getfixturevalue("postgres_stores")
                opened.callback(stores.give_back, url := stores.take())
            return opened.enter_context(Store.open(url))

        yield new


@pytest.fixture
def store(new_store: NewStore) -> Store:
    return new_store("sqlite")
