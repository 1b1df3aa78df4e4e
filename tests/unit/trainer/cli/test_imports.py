"""Commands that touch no tensor do not wait for torch; parts are known without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.trainer.prepared_run import save_smallest_model
from tracegrad_trainer.losses import compute_loss
from tracegrad_trainer.losses.advantages import ADVANTAGES
from tracegrad_trainer.losses.aggregation import AGGREGATIONS
from tracegrad_trainer.losses.corrections import CORRECTIONS, LEVELS
from tracegrad_trainer.losses.part_names import PARTS
from tracegrad_trainer.losses.ratios import RATIOS
from tracegrad_trainer.losses.surrogates import SURROGATES

# One process for all of them: the first that imports torch is named, and those after it.
COMMANDS = (
    "--help",
    "serve --help",
    "workers --help",
    "step --help",
    "sft --help",
    "replay --help",
    "export --help",
    "status",
    "step",  # no model: a wrong setting
    "serve --dry-run --model nowhere",  # a plan needs the model's shapes
)
PROBE = """
import json, sys
from tracegrad_trainer.cli.app import app
for words in sys.argv[1:]:
    try:
        app(words.split(), standalone_mode=True)
    except SystemExit:
        pass
    heavy = {"torch", "transformers", "peft"} & set(sys.modules)
    print("HEAVY", json.dumps([words, sorted(heavy)]))
"""
WAITING = ("cli.step", "launch.folder_lock", "launch.torchrun", "config.loading")
IMPORTS = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(f"tracegrad_trainer.{name}")
    print("HEAVY", json.dumps([name, ["torch"] if "torch" in sys.modules else []]))
"""


def heavy(code: str, *words: str, folder: Path) -> list[tuple[str, list[str]]]:
    """Of each of `words`, what was imported when it was done."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("HEAVY ")]
    return [(words, found) for words, found in (json.loads(line[6:]) for line in said)]


def test_a_command_without_tensors_imports_no_torch(tmp_path: Path) -> None:
    save_smallest_model(tmp_path / "model")
    found = heavy(PROBE, *COMMANDS, folder=tmp_path)
    assert found == [(words, []) for words in COMMANDS]


def test_who_only_waits_for_ranks_imports_no_torch(tmp_path: Path) -> None:
    assert heavy(IMPORTS, *WAITING, folder=tmp_path) == [(name, []) for name in WAITING]


def test_the_registries_hold_exactly_the_names_that_settings_know() -> None:
    assert callable(compute_loss), "all parts are imported"
    every = (ADVANTAGES, RATIOS, SURROGATES, CORRECTIONS, LEVELS, AGGREGATIONS)
    assert {registry.kind: set(registry) for registry in every} == {
        kind: set(names) for kind, names in PARTS.items()
    }
