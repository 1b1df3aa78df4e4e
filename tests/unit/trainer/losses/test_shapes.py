"""The shapes that are written beside every part are what it gets and returns.

jaxtyping checks them by an import hook, so in a process of its own: here the parts are long since
imported without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PARTS = (
    *("aggregation", "corrections", "diagnostics", "gae", "kl", "objective", "pairs", "ratios"),
    *("surrogates", "tokens", "value"),
)
PACKAGES = ",".join(f"tracegrad_trainer.losses.{part}" for part in PARTS)
FILES = ("presets", "ratios", "terms")

WRONG = """
from dataclasses import replace
import pytest
import torch
from jaxtyping import TypeCheckError
from support.trainer.loss_tokens import made
from tracegrad_trainer.losses import evaluate, preset

def test_wrong_shapes_are_refused():
    given = made(0)
    with pytest.raises(TypeCheckError):
        replace(given, rollout_logprobs=given.mu[1:])
    with pytest.raises(TypeCheckError):
        replace(given, turn=given.turn.double())
    from tracegrad_trainer.losses.ratios import against
    with pytest.raises(TypeCheckError):
        against(given.mu[None], given, preset("grpo"))
"""


def test_every_part_keeps_the_shapes_that_it_names(tmp_path: Path) -> None:
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text(WRONG)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
            f"--jaxtyping-packages={PACKAGES},beartype.beartype",
            *("-k", "by_hand or evaluates or wrong_shapes"),
            *(str(HERE / f"test_objectives_{name}.py") for name in FILES),
            str(wrong),
        ],
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout
