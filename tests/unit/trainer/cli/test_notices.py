"""`trainer serve` says why it waits once, and again when the reason is another; and a pattern that
fits no turn, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracegrad.store import StoreBusy
from tracegrad_trainer.cli.notices import LINES_S, PATIENCE_S, PatternNotice, WaitNotice
from tracegrad_trainer.launch.run_state import RunState
from tracegrad_trainer.rl.wait_reason import WaitReason


class Supervisor:
    """What the loop of `trainer serve` does, with a clock and a store of its own."""

    def __init__(self, state_dir: Path) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.reason = WaitReason("few_attempts", "1 task has 1 of 4 attempts")
        self.asked = 0
        self.busy = False
        self.ranks = RunState(state_dir, "ranks")
        self.notice = WaitNotice(state_dir, self._reason, self.lines.append, clock=lambda: self.now)

    def _reason(self) -> WaitReason:
        self.asked += 1
        if self.busy:
            raise StoreBusy("locked")
        return self.reason

    def polls(self, seconds: float) -> list[str]:
        """The lines of so many seconds, at five polls a second."""
        self.lines.clear()
        for _ in range(round(seconds * 5)):
            self.notice.tick()
            self.now += 0.2
        return list(self.lines)


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    made = Supervisor(tmp_path)
    made.ranks.update(stage="waiting")
    return made


def test_a_reason_is_said_at_once_and_not_again(supervisor: Supervisor) -> None:
    assert supervisor.polls(1) == ["waiting: 1 task has 1 of 4 attempts"]
    supervisor.reason = WaitReason("few_attempts", "2 tasks have 1 of 4 attempts")
    assert supervisor.polls(300) == []
    assert supervisor.asked < 300, "the store is looked at now and then, not at every poll"


def test_another_reason_is_said_and_what_comes_and_goes_does_not_flood(
    supervisor: Supervisor,
) -> None:
    supervisor.polls(1)
    supervisor.reason = WaitReason("open", "1 rollout not finished")
    assert supervisor.polls(LINES_S + 4) == ["waiting: 1 rollout not finished"]
    said = 0
    for second in range(120):
        supervisor.reason = WaitReason(("open", "few_attempts")[second // 3 % 2], str(second))
        said += len(supervisor.polls(1))
    assert 1 <= said <= 120 / LINES_S + 1


def test_a_short_wait_between_two_steps_is_not_worth_a_line(supervisor: Supervisor) -> None:
    supervisor.polls(1)
    supervisor.ranks.update(stage="training")
    assert supervisor.polls(10) == []
    supervisor.ranks.update(stage="waiting")
    assert supervisor.polls(PATIENCE_S - 4) == []
    assert supervisor.polls(8) == ["waiting: 1 task has 1 of 4 attempts"]


def test_a_batch_that_is_ready_and_a_busy_store_are_no_reasons(supervisor: Supervisor) -> None:
    supervisor.busy = True
    assert supervisor.polls(5) == []
    supervisor.busy, supervisor.reason = False, WaitReason("ready", "2 of 2 groups ready")
    assert supervisor.polls(5) == []
    supervisor.reason = WaitReason("open", "1 rollout not finished")
    assert supervisor.polls(5) == ["waiting: 1 rollout not finished"]


def test_while_weights_are_pushed_nobody_waits(supervisor: Supervisor) -> None:
    supervisor.ranks.update(stage="pushing")
    assert supervisor.polls(100) == []
    assert supervisor.asked == 0


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
