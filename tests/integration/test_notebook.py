"""examples/notebook: its cells, from the first to the last, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "notebook" / "first_steps.ipynb"


def cells(kind: str) -> list[str]:
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    found = [cell for cell in notebook["cells"] if cell["cell_type"] == kind]
    assert all(not cell.get("outputs") for cell in found), "outputs are of one machine: clear them"
    return ["".join(cell["source"]) for cell in found]


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(tmp_path: Path) -> None:
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join(cells("code")), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "NOTEBOOK_FOLDER": str(tmp_path / "run")},
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "step 3: version 3" in done.stdout
    assert "sampled, mean log-probability" in done.stdout


def test_links_of_it_lead_somewhere() -> None:
    text = "\n".join(cells("markdown"))
    links = [part.split(")")[0] for part in text.split("](")[1:]]
    assert len(links) >= 4
    assert [link for link in links if not (NOTEBOOK.parent / link).is_file()] == []
