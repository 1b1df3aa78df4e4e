"""Commands that touch no tensor do not wait for torch; parts are known without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.trainer.prepared_run import save_smallest_model
from tracegrad_trainer.losses import compute_loss
from tracegrad_trainer.losses.advantages import ADVANTAGES
from tracegrad_trainer.losses.aggregation import AGGREGATIONS
from tracegrad_trainer.losses.corrections import CORRECTIONS, LEVELS
from tracegrad_trainer.losses.part_names import PARTS
from tracegrad_trainer.losses.ratios import RATIOS
from tracegrad_trainer.losses.surrogates import SURROGATES

PROBE = """
import sys
from tracegrad_trainer.cli.app import app
try:
    app(sys.argv[1:], standalone_mode=True)
except SystemExit:
    pass
heavy = {"torch", "transformers", "peft"} & set(sys.modules)
print("HEAVY", sorted(heavy))
"""


def heavy(code: str, *words: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["serve", "--help"],
        ["step", "--help"],
        ["sft", "--help"],
        ["replay", "--help"],
        ["export", "--help"],
        ["status"],
        ["step"],  # no model: a wrong setting
        ["serve", "--dry-run", "--model", "nowhere"],  # a plan needs the model's shapes
    ],
    ids=" ".join,
)
def test_a_command_without_tensors_imports_no_torch(words: list[str], tmp_path: Path) -> None:
    if "model" in words:
        save_smallest_model(tmp_path / "model")
    assert heavy(PROBE, *words, folder=tmp_path) == "HEAVY []"


@pytest.mark.parametrize(
    "module", ["cli.step", "launch.folder_lock", "launch.torchrun", "config.trainer"]
)
def test_who_only_waits_for_ranks_imports_no_torch(module: str, tmp_path: Path) -> None:
    code = f"import sys, tracegrad_trainer.{module}; print('torch' in sys.modules)"
    assert heavy(code, folder=tmp_path) == "False"


def test_the_registries_hold_exactly_the_names_that_settings_know() -> None:
    assert callable(compute_loss), "all parts are imported"
    every = (ADVANTAGES, RATIOS, SURROGATES, CORRECTIONS, LEVELS, AGGREGATIONS)
    assert {registry.kind: set(registry) for registry in every} == {
        kind: set(names) for kind, names in PARTS.items()
    }
