"""A proxy before a scripted engine, which the runner finds by its environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.engines.mock_engine import MockEngine
from support.proxy.proxy_with_engine import ProxyWithEngine, proxy_with_engine
from support.proxy.servers import EngineServer, serving
from tracegrad.store import Store


@contextmanager
def runner_proxy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Iterator[ProxyWithEngine]:
    """The current folder is an empty one, in `folder`. `settings`: the proxy's."""
    Store.open(f"sqlite:///{folder}/store.db").close()
    server = EngineServer()
    with (
        serving(server, lifespan="off") as server.url,
        proxy_with_engine(server, MockEngine(), folder / "store.db", **settings) as found,
    ):
        monkeypatch.setenv("TRACEGRAD_URL", found.url)
        monkeypatch.delenv("TRACEGRAD_API_KEY", raising=False)
        (folder / "here").mkdir()
        monkeypatch.chdir(folder / "here")
        yield found
        found.close_clients()
