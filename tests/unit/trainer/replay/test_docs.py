"""docs/replay.md and docs/metrics.md name commands, options and settings that there are."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from tracegrad_trainer.cli.app import app
from tracegrad_trainer.metrics import MetricsSettings, find_metric

DOCS = Path(__file__).parents[4] / "docs"
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


def commands(page: str) -> list[list[str]]:
    """The words of every `trainer …` in a block of code."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:console|sh)\n(.*?)```", text, re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    found = [re.split(r" +# | \| ", line)[0].split() for line in lines]
    return [words for words in found if words[:1] == ["trainer"] and words[1] in COMMANDS]


@pytest.mark.parametrize("words", commands("replay.md"), ids=" ".join)
def test_a_command_of_the_page_can_be_typed(words: list[str]) -> None:
    command = COMMANDS[words[1]]
    command.make_context(words[1], words[2:])  # raises what a wrong option would


def test_the_page_has_commands() -> None:
    assert len(commands("replay.md")) >= 10


def test_the_settings_of_the_page_are_settings() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    given = tomllib.loads(block)["metrics"]
    read = MetricsSettings.model_validate(given)
    assert read.wandb is not None
    assert given.keys() == MetricsSettings.model_fields.keys()


def test_alerts_are_about_metrics_that_there_are() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    alerts = set(re.findall(r"tracegrad_trainer_(\w+)", text)) - {"step", "name"}
    own = {"held", "seconds_total", "turns_not_trained_total", "decisions_total"}
    assert alerts >= own
    unknown = [
        n for n in alerts - own if not (find_metric(n) or find_metric(n.replace("_", "/", 1)))
    ]
    assert unknown == []
