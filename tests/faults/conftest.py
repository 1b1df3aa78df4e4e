"""Faults, and what the trainer, the proxy and the store make of them. Real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.store import postgres_server as postgres

if TYPE_CHECKING:
    from support.trainer.kill_runs import Runs


@pytest.fixture(scope="session")
def char_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Brings torch along, which the store's faults do without.
    from support.trainer.char_model import save_char_model

    return save_char_model(tmp_path_factory.mktemp("char") / "model")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For `trainer step`."""
    from support.trainer.prepared_run import save_smallest_model

    return save_smallest_model(tmp_path_factory.mktemp("smallest") / "model")


@pytest.fixture(scope="session")
def runs() -> Iterator[Runs]:
    """Ranks that die where they are told to."""
    from support.trainer.kill_runs import step_runs

    with step_runs() as found:
        yield found


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
