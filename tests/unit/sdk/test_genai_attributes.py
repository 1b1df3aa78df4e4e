"""Names of the GenAI conventions stand in one file, since they still move."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tracegrad
from tracegrad import genai_attributes

ROOT = Path(tracegrad.__file__).resolve().parents[2]


def texts_of(path: Path) -> Iterator[str]:
    """Literal strings, without those that are only there to be read."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_no_other_file_spells_a_name() -> None:
    sources = [
        path
        for folder in ("sdk/tracegrad", "trainer/tracegrad_trainer", "integrations")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(sources) > 100
    prefix = genai_attributes.PREFIX
    found = {path.name for path in sources if any(prefix in text for text in texts_of(path))}
    assert found == {"genai_attributes.py"}
