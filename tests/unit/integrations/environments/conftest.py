from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.proxy.proxy_with_engine import ProxyWithEngine
from support.runner.runner_proxy import runner_proxy


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxyWithEngine]:
    """As of `runner_proxy`."""
    with runner_proxy(tmp_path, monkeypatch) as found:
        yield found
