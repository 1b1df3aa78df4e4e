"""The page over a store of its own, in Starlette's test client."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tracegrad.store import Store
from tracegrad.ui.app import make_ui, ui_routes
from tracegrad.ui.security import Sessions


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "empty.db"
    Store.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def store(tmp_path: Path, empty_store: Path) -> Iterator[Store]:
    shutil.copy(empty_store, tmp_path / "store.db")
    with Store.open(f"sqlite:///{tmp_path}/store.db") as opened:
        yield opened


@pytest.fixture
def browse(store: Store) -> Callable[..., TestClient]:
    """A browser at the page of a proxy with this admin key; None: an open one."""

    def made(admin_key: str | None = None) -> TestClient:
        page = make_ui(store, sessions=Sessions(admin_key))
        app = Starlette(routes=ui_routes(page))
        return TestClient(app, base_url="http://127.0.0.1:4141", headers={"accept": "text/html"})

    return made


def token_in(page: str) -> str:
    """The token of a page's forms."""
    found = re.search(r'name="csrf" value="([0-9a-f]+)"', page)
    assert found is not None, "the page has no form with a token"
    return found[1]
