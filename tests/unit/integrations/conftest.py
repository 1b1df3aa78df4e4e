"""Rows do not depend on the database: SQLite alone."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["sqlite"])
def url(url: str) -> str:
    return url
