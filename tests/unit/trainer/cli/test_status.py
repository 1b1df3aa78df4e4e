"""`trainer status` from a store and the files of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tracegrad.store import Ledger, PolicyVersion, StepRecord, Store
from tracegrad_trainer.cli.render_status import format_step_line
from tracegrad_trainer.cli.status import collect_status
from tracegrad_trainer.launch.run_state import RunState, delete_state, read_state
from tracegrad_trainer.launch.session import StepFeed
from tracegrad_trainer.launch.torchrun import RankProcesses
from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess


def test_the_newest_steps_come_first(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/store.db") as store:
        for number in range(1, 13):
            record = StepRecord(
                step=number, version=number, metrics={"seconds": {"train": 1.0}}, checkpoint="x"
            )
            Ledger(store).commit_step(record, trained=[], skipped={}, rollouts=[])
            store.record_version(PolicyVersion(number, number, "serving"))
        found = collect_status(store, tmp_path, tags={})
    assert [step["step"] for step in found.steps] == list(range(12, 2, -1))
    assert found.steps_total == found.version == 12
    assert found.seconds == {"train": 12.0}
    assert found.stage == "stopped"


def test_each_step_is_news_once_however_many_come_between(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/store.db") as store:

        def commit(*numbers: int) -> None:
            for number in numbers:
                record = StepRecord(step=number, version=number)
                Ledger(store).commit_step(record, trained=[], skipped={}, rollouts=[])

        commit(1, 2)
        news = StepFeed(store)
        assert news.new_steps() == []
        commit(*range(3, 53))
        assert [step.step for step in news.new_steps()] == [*range(3, 53)]
        assert news.new_steps() == []


def test_a_mismatch_after_a_push_is_loud() -> None:
    step = StepRecord(step=7, version=8, metrics={"gap_max": 4.6, "mismatch": 1.0})
    assert "gap 4.6e+00 TOO LARGE: serving and training engine disagree" in format_step_line(step)
    quiet = StepRecord(step=7, version=8, metrics={"gap_max": 3e-6, "mismatch": 0.0})
    assert "TOO LARGE" not in format_step_line(quiet)


def test_a_process_that_is_gone_does_not_run(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    state = RunState(tmp_path, "serve")
    state.update(pid=gone.pid, stage="serving")
    with Store.open(f"sqlite:///{tmp_path}/store.db") as store:
        assert collect_status(store, tmp_path, tags={}).stage == "stopped"
        state.update(pid=os.getpid())
        assert collect_status(store, tmp_path, tags={}).stage == "serving"
    delete_state(tmp_path, "serve")
    assert read_state(tmp_path, "serve") is None


def test_news_that_cannot_be_written_stop_nobody(tmp_path: Path) -> None:
    state = RunState(tmp_path / "state", "serve")
    state.update(stage="serving")
    (tmp_path / "state" / "run").rename(tmp_path / "elsewhere")
    state.update(stage="stopping")  # as on a disk that is full
    assert read_state(tmp_path / "state", "serve") is None


LAUNCHER_SAYS = """\
RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 4243)
  error_file: <N/A>
============================================================
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-signal.SIGKILL, r"^rank 1 \(pid 4243\) was killed by SIGKILL \(log: .*ranks\.log\)$"),
        (1, r"^ranks \(pid \d+\) exited with 1: RuntimeError: .*Connection closed"),
    ],
)
def test_the_rank_that_was_killed_is_named(tmp_path: Path, code: int, words: str) -> None:
    ranks = RankProcesses.__new__(RankProcesses)  # as it is, but for what it runs
    said = LAUNCHER_SAYS.format(code=code)
    command = [sys.executable, "-c", f"print({said!r}); raise SystemExit(1)"]
    ChildProcess.__init__(ranks, "ranks", command, log=tmp_path / "ranks.log")
    ranks.start()
    ranks._process.wait()  # type: ignore[union-attr]
    with pytest.raises(ChildError, match=words):
        ranks.check()
