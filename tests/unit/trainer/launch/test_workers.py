"""Workers by the settings that have work for them, and who of them has said that it is there."""

from __future__ import annotations

import json
import logging
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.trainer.step_samples import trainer_settings
from tracegrad_trainer.config.loading import load_settings
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.run_state import SILENT_S, RunState
from tracegrad_trainer.launch.workers import (
    EVALUATOR,
    RESAMPLING,
    SCORERS,
    WORKERS,
    absent_workers,
    wanted_workers,
    worker_process,
)
from tracegrad_trainer.rl.own_launcher import warn_of_absent_workers

SCORED = {"commands": {"resolved": "true"}}


def gated(folder: Path) -> dict[str, Any]:
    return {"gate": "held_out", "tasks": folder / "tasks.jsonl", "agent": "codex"}


def all_wanted(folder: Path) -> TrainerSettings:
    return trainer_settings(
        folder,
        rewards=SCORED,
        resample={"prompts": "live"},
        data={"tags": {"resampled": "true"}, "in_flight": 8},
        promotion=gated(folder),
    )


def test_who_is_wanted_the_settings_say(tmp_path: Path) -> None:
    assert wanted_workers(trainer_settings(tmp_path)) == []
    assert wanted_workers(trainer_settings(tmp_path, rewards=SCORED)) == [SCORERS]
    assert wanted_workers(trainer_settings(tmp_path, promotion=gated(tmp_path))) == [EVALUATOR]
    assert wanted_workers(all_wanted(tmp_path)) == list(WORKERS)


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_is_a_process_of_its_module_with_a_log_of_its_name(
    tmp_path: Path, name: str
) -> None:
    settings = trainer_settings(tmp_path)
    process = worker_process(name, settings, tmp_path / "settings.json")
    module = process.command[2]
    assert process.command[1:] == ["-m", module, str(tmp_path / "settings.json")]
    assert find_spec(module) is not None
    assert process.log == settings.logs / f"{name}.log"


@pytest.mark.parametrize("url", [None, "http://10.0.0.1:4141"])
@pytest.mark.parametrize("name", [RESAMPLING, EVALUATOR])
def test_who_calls_the_proxy_finds_it_and_has_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, url: str | None
) -> None:
    """Also of another's proxy, whose key nobody else hands on."""
    made = trainer_settings(tmp_path)
    sets = [f"model={made.model}", f"state_dir={made.state_dir}"]
    sets += [] if url is None else [f"proxy_url={url}"]
    monkeypatch.delenv("TRACEGRAD_API_KEY", raising=False)
    process = worker_process(name, load_settings(None, sets), tmp_path / "settings.json")
    assert process.env["TRACEGRAD_API_KEY"] == "", "none of somebody else's"
    monkeypatch.setenv("TRACEGRAD_API_KEY", "k" * 32)
    settings = load_settings(None, sets)
    process = worker_process(name, settings, tmp_path / "settings.json")
    assert process.env["TRACEGRAD_URL"] == settings.url == (url or "http://127.0.0.1:4141")
    assert process.env["TRACEGRAD_API_KEY"] == "k" * 32
    scorers = worker_process(SCORERS, settings, tmp_path / "settings.json")
    assert "TRACEGRAD_API_KEY" not in scorers.env


def test_ranks_of_another_launcher_say_whom_nobody_has_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = all_wanted(tmp_path)
    file = tmp_path / "tracegrad.toml"
    RunState(settings.state_dir, RESAMPLING).update(stage="sampling")
    assert absent_workers(settings) == [SCORERS, EVALUATOR]
    with caplog.at_level(logging.WARNING):
        warn_of_absent_workers(settings, file)
    [said] = caplog.messages
    assert said.startswith("scorers and evaluator: these settings need them")
    assert said.endswith(f"trainer workers --config {file} --state-dir {settings.state_dir}")
    caplog.clear()
    for name in (SCORERS, EVALUATOR):
        RunState(settings.state_dir, name).update(stage="working")
    warn_of_absent_workers(settings, file)
    assert caplog.messages == []


def test_one_that_is_silent_for_long_is_absent(tmp_path: Path) -> None:
    settings = trainer_settings(tmp_path, rewards=SCORED)
    RunState(settings.state_dir, SCORERS).update(stage="working")
    assert absent_workers(settings) == []
    file = settings.state_dir / "run" / "scorers.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"updated_at": time.time() - 2 * SILENT_S}))
    assert absent_workers(settings) == [SCORERS]
    del said["updated_at"]  # as an earlier version wrote it
    file.write_text(json.dumps(said))
    assert absent_workers(settings) == [SCORERS]
