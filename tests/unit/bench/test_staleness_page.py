"""The page of `python -m bench.staleness`, of figures that were made up."""

from __future__ import annotations

from pathlib import Path

from bench.staleness.__main__ import MODES, Measured, page
from examples.shop.run import SERVE

from tracegrad_trainer.config.loading import load_settings


def measured(number: int, **changes: object) -> Measured:
    found = {
        "mode": MODES[number],
        "steps": 4,
        "seconds": 10.0,
        "lags": {"0": 0.5, "2": 0.25, "7": 0.25},
        "dropped": {"stale": 0.125},
        "success": 0.75,
    }
    return Measured(**{**found, **changes})  # type: ignore[arg-type]


def test_what_is_older_than_the_last_column_is_added_up() -> None:
    row = next(line for line in page([measured(0)], 4).splitlines() if "synchronous |" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:7] == ["50.0 %", "0.0 %", "25.0 %", "0.0 %", "0.0 %", "25.0 %"]
    assert cells[7:] == ["12.5 %", "2.50", "0.75"]


def test_every_mode_is_a_setting_that_the_trainer_takes(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).touch()
    for mode in MODES:
        given = {**SERVE, **mode.settings, "model": tmp_path, "state_dir": tmp_path / "state"}
        settings = load_settings(None, [f"{name}={value}" for name, value in given.items()])
        assert settings.data.synchronous or settings.batches.max_staleness in (1, 4)
        assert mode.asks == (settings.batches.stale == "wait" or settings.data.synchronous)
