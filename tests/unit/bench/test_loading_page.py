"""docs/training.md has the paper's table of loading as the estimate gives it."""

from __future__ import annotations

from pathlib import Path

from bench.trainer.loading import MODELS, paper_table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "training.md"


def test_the_page_has_the_table() -> None:
    table = paper_table()
    assert table in PAGE.read_text(encoding="utf-8"), "run python -m bench.trainer.loading"
    assert all(f"| {name} |" in table for name in MODELS)
