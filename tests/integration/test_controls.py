"""The honest controls in their short form: real processes, the demo's own agent and model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_a_seed_rises_and_the_controls_do_not() -> None:
    """Learning rate 0 and shuffled rewards must leave held-out success where it was."""
    command = [sys.executable, "-m", "examples.shop.controls", "--short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" yes") == 3, "a seed and two controls were measured"
