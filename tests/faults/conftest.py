"""Faults, and what `trainer serve` makes of them. Real processes, a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.char_model import save_char_model


@pytest.fixture(scope="session")
def char_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_char_model(tmp_path_factory.mktemp("char") / "model")
