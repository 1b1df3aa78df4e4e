from __future__ import annotations

import pytest

from support.proxy.key_store import Cupboard


@pytest.fixture
def cupboard() -> Cupboard:
    return Cupboard()
