"""Faults, and what the trainer, the proxy and the store make of them. Real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.store import postgres_server as postgres


@pytest.fixture(scope="session")
def char_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Brings torch along, which the store's faults do without.
    from support.trainer.char_model import save_char_model

    return save_char_model(tmp_path_factory.mktemp("char") / "model")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    """It flushes what it commits, as servers do outside of tests."""
    with postgres.running(durable=True) as server:
        yield server


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def postgres_url(postgres_server: postgres.Server) -> Iterator[str]:
    url = postgres_server.new_database()
    yield url
    postgres_server.drop(url)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """Of an empty store, in each database."""
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found
