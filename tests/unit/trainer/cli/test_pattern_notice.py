"""A pattern that fits no turn is on the screen of those who wait for the ranks, once."""

from __future__ import annotations

from pathlib import Path

from tracegrad_trainer.cli.pattern_notice import PatternNotice
from tracegrad_trainer.launch.run_state import RunState


def test_each_pattern_is_said_once_whatever_there_is_meanwhile(tmp_path: Path) -> None:
    lines: list[str] = []
    notice = PatternNotice(tmp_path, lines.append)
    notice.tick()
    ranks = RunState(tmp_path, "ranks")
    ranks.update(stage="starting")
    notice.tick()
    assert lines == []
    ranks.update(stage="waiting", unmatched={"a": "a fits no turn; there are: 'x'"})
    notice.tick()
    ranks.update(unmatched={"a": "a fits no turn; there are: 'x', 'y'", "b": "b fits no turn"})
    notice.tick()
    ranks.update(unmatched={})
    notice.tick()
    assert lines == ["a fits no turn; there are: 'x'", "b fits no turn"]


def test_what_fits_no_live_prompt_is_said_too(tmp_path: Path) -> None:
    lines: list[str] = []
    RunState(tmp_path, "resampling").update(unmatched={"a": "a fits no turn"})
    PatternNotice(tmp_path, lines.append).tick()
    assert lines == ["a fits no turn"]
