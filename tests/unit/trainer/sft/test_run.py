"""`trainer sft` as the command that waits for its ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.trainer.sft_samples import char_model, settings
from tracegrad_trainer.sft import run as sft_command
from tracegrad_trainer.sft.config import SftSettings

FAILED = [{"event": "failed", "error": "the model's vocabulary is another"}]
DATA = {"event": "data", "run": "x"}
STOPPED = [DATA, {"event": "stopped", "step": 0}]


def run_with(
    asked: SftSettings, said: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> list[Path]:
    """What the ranks of `asked` were given to read, which then report `said`."""
    given: list[Path] = []

    class Ranks:
        log = Path()

        def __init__(self, _: object, resolved: Path, *, program: str) -> None:
            self.resolved = resolved

        def start(self) -> None:
            assert SftSettings.model_validate_json(self.resolved.read_text()) == asked
            given.append(self.resolved)
            lines = (json.dumps(record) + "\n" for record in said)
            asked.progress_file.write_text("".join(lines))

        def exit_code(self) -> int:
            return 0

        def stop(self, *, grace_s: float) -> None: ...

    monkeypatch.setattr(sft_command, "RankProcesses", Ranks)
    monkeypatch.setattr(sft_command, "_show", lambda *_, **__: None)
    sft_command.run_sft(asked, Console())
    return given


def test_settings_that_the_ranks_refuse_are_not_the_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = settings(char_model(tmp_path / "model"), tmp_path)
    kept = asked.trainer.state_dir / "run" / "sft.json"
    [read] = run_with(asked, FAILED, monkeypatch)
    assert not kept.exists()
    assert not read.exists()
    run_with(asked, STOPPED, monkeypatch)
    before = kept.read_bytes()
    other = asked.model_copy(update={"epochs": 7})
    [read] = run_with(other, [DATA, *FAILED], monkeypatch)
    assert (kept.read_bytes(), read.exists()) == (before, False)
    run_with(other, STOPPED, monkeypatch)
    assert SftSettings.model_validate_json(kept.read_text()).epochs == 7
