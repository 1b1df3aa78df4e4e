"""What commands print: every word of it, to the end of the line, and nothing that is not so."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from support.trainer.step_samples import SEVERAL, rollout, train, trained, trainer_settings
from tracegrad.events import Turn
from tracegrad.inspect.step_columns import StepColumn
from tracegrad.store import StepRecord, Store
from tracegrad_trainer.cli import dry_run
from tracegrad_trainer.cli.render_status import format_step_line
from tracegrad_trainer.replay.load import list_candidates
from tracegrad_trainer.replay.render import render_candidates
from tracegrad_trainer.replay.replay import ReplayRequest, replay
from tracegrad_trainer.sft.report import SftReport
from tracegrad_trainer.utils.console import plain_table, print_json, print_report

BRACKETS = "fix [easy] the [/bold] parser, and whatever else is in this very long name of a task"


def test_names_of_tasks_are_no_markup_and_a_pipe_cuts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    settings = trainer_settings(tmp_path)
    with Store.open(settings.proxy.store) as store:
        for n in range(2):
            store.append(rollout(f"r{n}", BRACKETS, reward=float(n), seed=n))
        store.append(rollout("alone", f"{BRACKETS}, too", reward=1.0, seed=9))
    assert dry_run.show_dry_run(settings, Console(file=sys.stdout), False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(BRACKETS)]
    assert [line for line in lines if line.startswith(f"{BRACKETS}, too")]


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_breaks_words_and_no_number(width: int) -> None:
    shown = plain_table("task", "reward", "turns", "why", words=["why"])
    shown.add_row(BRACKETS, "0.123456789", "17", BRACKETS)
    out = io.StringIO()
    print_report(shown, Console(file=out, width=width, force_terminal=True, color_system=None))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "0.123456789     17" in text
    assert "…" not in text


def test_a_step_of_several_passes_says_how_many_turns_it_trained(tmp_path: Path) -> None:
    settings = trained(tmp_path, 2, 1, optim=SEVERAL)
    with Store.open(settings.proxy.store) as store:
        [found] = list_candidates(store, settings.state_dir, limit=9)
    assert found.step.metrics["turns_trained"] > 12, "they count in every pass"
    assert found.problem is None
    assert "4 rollouts, 12 turns trained" in format_step_line(found.step)
    out = io.StringIO()
    Console(file=out, width=80).print(render_candidates([found]))
    assert out.getvalue().splitlines()[1].split()[-3] == "12"


def test_a_gap_of_no_tokens_is_not_shown() -> None:
    metrics: dict[str, Any] = {"gap_max": 0.0, "gap_tokens": 0.0, "rollouts": 4.0}
    assert "gap" not in format_step_line(StepRecord(step=1, version=1, metrics=metrics))
    known = metrics | {"gap_tokens": 3.0}
    assert "gap 0.0e+00" in format_step_line(StepRecord(step=1, version=1, metrics=known))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((0.4, "0"), (9999.4, "9999"), (9999.6, "10k"), (999_400, "999k"), (999_600, "1.0M")),
        *((5_000_000, "5.0M"), (9_960_000, "10M"), (999_600_000, "1G"), (None, "–")),
    ],
)
def test_tokens_a_second_take_four_characters(value: float | None, shown: str) -> None:
    column = StepColumn("tok/s", "tokens_per_second", "", None)
    assert column.cell({"tokens_per_second": value}) == shown
    assert len(shown) <= 4


def test_an_experts_turn_has_no_ratio_to_what_sampled_it(tmp_path: Path) -> None:
    settings = trainer_settings(tmp_path)
    with Store.open(settings.proxy.store) as store:
        for n in range(4):
            events = rollout(f"r{n}", f"t{n // 2}", reward=float(n % 2), seed=n, at=1000.0 + n)
            store.append([_demonstrated(event) for event in events])
        train(settings, 1)
        found = replay(store, settings.state_dir, ReplayRequest())
    ratios = {turn.turn_id: turn.ratio for turn in found.replayed.turns}
    assert len(ratios) == 12
    assert all((ratio == 1.0) == name.endswith(".0") for name, ratio in ratios.items())


def _demonstrated(event: Any) -> Any:
    """The first turn of a rollout; all else as it is."""
    if not (isinstance(event, Turn) and event.turn_id.endswith(".0")):
        return event
    return replace(event, sampling={"source": "expert"})


@pytest.mark.parametrize(("taken", "kept"), [(0, []), (1, [0, 1]), (2, [0, 1, 2])])
def test_a_run_that_goes_on_says_nothing_twice(tmp_path: Path, taken: int, kept: list[int]) -> None:
    report = SftReport(tmp_path, tmp_path / "progress")
    lines = [json.dumps({"event": "step", "step": step}) + "\n" for step in (0, 1, 2)]
    report.file.write_text("".join(lines) + '{"event": "step", "st')  # the disk was full
    report.run_resumed(taken)
    found = [json.loads(line)["step"] for line in report.file.read_text().splitlines()]
    assert found == kept


def test_json_has_no_word_for_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": float("nan"), "mean": np.float64(0.5), "name": "é"})
    assert capsys.readouterr().out == '{"loss":null,"mean":0.5,"name":"é"}\n'
