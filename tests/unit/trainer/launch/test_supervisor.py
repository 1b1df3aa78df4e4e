"""Parts that end are started again, with pauses that double, until they are given up."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tracegrad_trainer.launch.supervisor import (
    LONGEST_PAUSE_S,
    LOOK_EVERY_S,
    MISSED_LOOKS,
    STABLE_S,
    Backoff,
    Part,
    Supervisor,
)
from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess


def test_the_first_end_is_made_good_at_once_and_pauses_double_up_to_a_limit() -> None:
    backoff = Backoff(1000)
    pauses = [backoff.ended() for _ in range(1000)]
    assert pauses[:7] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE_S]
    assert set(pauses[6:]) == {LONGEST_PAUSE_S}
    assert backoff.ended() is None, "the 1001st in a row"
    backoff.achieved()
    assert backoff.ended() == 0.0


def test_without_restarts_the_first_end_is_the_last() -> None:
    assert Backoff(0).ended() is None


class FakeProcess(ChildProcess):
    """Ends when a test says so."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, ["unused"], log=folder / "log")
        self.starts, self.stops = 1, 0
        self.code: int | None = None
        self.refuses: str | None = None

    def start(self) -> None:
        if self.refuses:
            raise ChildError(self.refuses)
        self.starts, self.code = self.starts + 1, None

    def exit_code(self) -> int | None:
        return self.code

    def stop(self, *, grace_s: float = 10) -> None:
        assert grace_s == 0
        self.stops += 1


class Rig:
    """One part, its clock, and what is said."""

    def __init__(
        self,
        folder: Path,
        *,
        most: int = 3,
        answers: Callable[[], bool] | None = None,
        proven_by_time: bool = True,
        essential: bool = True,
    ) -> None:
        self.process = FakeProcess("vllm", folder)
        self.ready = True
        self.awaited: str | None = None
        self.now, self.said, self.changes = 1000.0, list[str](), 0
        self.part = Part(
            self.process,
            Backoff(most),
            lambda: self.ready,
            answers,
            proven_by_time=proven_by_time,
            essential=essential,
            awaits=lambda: self.awaited,
        )
        self.supervisor = Supervisor(
            [self.part],
            ready_timeout_s=50.0,
            say=self.said.append,
            changed=self.changed,
            clock=lambda: self.now,
            wall=lambda: 5e8 + self.now,
        )

    def changed(self) -> None:
        self.changes += 1

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.supervisor.tick()

    def end_and_return(self) -> None:
        self.process.code = -9
        self.tick()
        self.tick(LONGEST_PAUSE_S)
        self.tick()


def test_a_part_that_ended_is_started_again_and_said_to_be_ready(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.tick()
    assert (rig.said, rig.supervisor.as_json()) == ([], {}), "nothing is said of what runs"
    rig.process.code, rig.ready = -9, False
    rig.tick()
    assert rig.process.stops == 1, "what is left of it may hold a port"
    assert rig.said[-1].startswith("vllm (pid None) was killed by SIGKILL")
    assert rig.said[-1].endswith("; it is started again now")
    found = rig.supervisor.as_json()["vllm"]
    assert (found["restarts"], found["up"], found["last_end_at"]) == (1, False, 5e8 + 1000.0)
    rig.tick()
    assert rig.process.starts == 2
    rig.tick(20.0)
    assert not rig.part.is_up
    rig.ready = True
    rig.tick()
    assert rig.said[-1] == "vllm ready again (pid None, 20 s)"
    assert rig.supervisor.as_json()["vllm"]["up"]
    assert rig.changes == 2


def test_what_no_call_needs_ends_no_run(tmp_path: Path) -> None:
    """As scorers whose function is broken: people are served all the same."""
    rig = Rig(tmp_path, most=2, essential=False)
    for _ in range(6):
        rig.end_and_return()
    assert rig.process.starts == 7
    assert "it has ended 6 times in a row (max_restarts); it is started again in 30 s" in next(
        line for line in reversed(rig.said) if "ended" in line
    )
    rig = Rig(tmp_path, most=0, essential=False)
    rig.process.code = 1
    with pytest.raises(ChildError):
        rig.tick()


def test_a_start_that_would_fail_is_put_off_and_counts_for_nothing(tmp_path: Path) -> None:
    """As vLLM's, while ranks train in its memory for longer than five starts would take."""
    rig = Rig(tmp_path, most=1)
    rig.awaited = "when the ranks have trained"
    rig.process.code = -9
    for _ in range(100):
        rig.tick(60.0)
    assert (rig.process.starts, rig.part.restarts, rig.part.is_up) == (1, 1, False)
    assert [line.rpartition("; ")[2] for line in rig.said] == [
        "it is started again when the ranks have trained"
    ]
    rig.awaited = None
    rig.tick()
    rig.tick()
    assert (rig.process.starts, rig.part.is_up) == (2, True)


def test_it_waits_out_its_pause(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.end_and_return()
    rig.process.code = 1
    rig.tick()
    assert rig.said[-1].endswith("it is started again in 1 s")
    rig.tick(0.9)
    assert rig.process.starts == 2
    rig.tick(0.2)
    assert rig.process.starts == 3


def test_one_that_keeps_ending_is_given_up(tmp_path: Path) -> None:
    rig = Rig(tmp_path, most=2)
    rig.end_and_return()
    rig.end_and_return()
    rig.process.code = 7
    with pytest.raises(ChildError, match=r"exited with 7.* 3 times in a row \(max_restarts\)"):
        rig.tick()


def test_without_restarts_its_end_is_told_as_it_is(tmp_path: Path) -> None:
    rig = Rig(tmp_path, most=0)
    rig.process.code = -9
    with pytest.raises(ChildError, match=r"^vllm \(pid None\) was killed by SIGKILL \(log: \S+\)$"):
        rig.tick()


def test_a_minute_of_service_proves_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, most=1)
    for _ in range(5):
        rig.end_and_return()
        rig.tick(STABLE_S)
    assert rig.part.restarts == 5


def test_ranks_are_proven_by_their_steps_alone_and_may_be_done(tmp_path: Path) -> None:
    rig = Rig(tmp_path, most=1, proven_by_time=False)
    rig.end_and_return()
    rig.tick(10 * STABLE_S)
    rig.part.backoff.achieved()  # a step
    rig.end_and_return()
    rig.process.code = 0
    rig.tick()
    assert rig.part.restarts == 2, "ranks that are done are not started again"
    rig.process.code = 1
    with pytest.raises(ChildError):
        rig.tick()


def test_one_that_cannot_start_or_is_never_ready_has_ended(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.process.code, rig.process.refuses = -9, "port 8000 cannot be used"
    rig.tick()
    rig.tick()
    assert rig.said[-1] == "port 8000 cannot be used; it is started again in 1 s"
    rig.process.refuses, rig.ready = None, False
    rig.tick(1.0)
    rig.tick(50.1)
    assert rig.said[-1].startswith("vllm is not ready after 50 s")


def test_one_that_answers_no_more_has_ended_but_not_after_a_pause_of_ours(tmp_path: Path) -> None:
    asked = list[float]()
    answers = False

    def answer() -> bool:
        asked.append(rig.now)
        return answers

    rig = Rig(tmp_path, answers=answer)
    rig.tick()
    rig.tick(3600.0)  # we were stopped: one look is missed, not an hour of them
    for _ in range(MISSED_LOOKS - 3):
        rig.tick(LOOK_EVERY_S)
        rig.tick(LOOK_EVERY_S / 10)
    assert len(asked) == MISSED_LOOKS - 1, "no more often than that"
    answers = True
    rig.tick(LOOK_EVERY_S)
    answers = False
    for _ in range(MISSED_LOOKS - 1):
        rig.tick(LOOK_EVERY_S)
    assert rig.said == []
    rig.tick(LOOK_EVERY_S)
    assert "has not answered 12 times in a row" in rig.said[0]
    assert rig.process.stops == 1


def test_a_real_process_is_started_again_with_its_log(tmp_path: Path) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = ChildProcess("part", [sys.executable, "-c", program], log=tmp_path / "log")
    said: list[str] = []
    part = Part(process, Backoff(1), lambda: "\n" in process.logged())
    supervisor = Supervisor([part], 60.0, said.append)
    process.start()
    try:
        first = process.pid
        deadline = time.monotonic() + 60
        while "\n" not in process.logged():
            assert time.monotonic() < deadline
        process.kill()
        while not (part.restarts and part.is_up):
            supervisor.tick()
            assert time.monotonic() < deadline
        assert process.pid != first
        assert process.log.read_text().split() == [str(first), str(process.pid)]
    finally:
        process.stop(grace_s=0)


def test_ranks_that_ended_well_may_ask_to_be_started_again(tmp_path: Path) -> None:
    """After a rollback: no failure is counted."""
    rig = Rig(tmp_path, proven_by_time=False, most=0)
    again = [True]
    rig.part.starts_again = lambda: again[0]
    rig.process.code = 0
    rig.supervisor.tick()
    assert rig.process.starts == 2
    assert (rig.part.restarts, rig.part.backoff.failures) == (0, 0)
    assert rig.said == ["vllm start again"]
    again[0] = False
    rig.supervisor.tick()
    assert rig.part.is_up
    rig.process.code = 0
    rig.supervisor.tick()
    assert rig.process.starts == 2, "they are done"
