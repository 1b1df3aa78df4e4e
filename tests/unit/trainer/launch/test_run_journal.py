"""How runs began and ended is kept beside what goes on, and outlives kills and full disks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tracegrad_trainer.launch.run_journal import RunJournal, read_runs
from tracegrad_trainer.launch.run_state import (
    process_identity,
    process_is_alive,
)

BEGIN = (
    "import sys, time; from pathlib import Path;"
    "from tracegrad_trainer.launch.run_journal import RunJournal;"
    "RunJournal(Path(sys.argv[1]), 'trainer serve', step=39, version=40);"
    "print('begun', flush=True); time.sleep(600)"
)


def test_each_run_is_kept_with_its_beginning_and_its_end(tmp_path: Path) -> None:
    assert read_runs(tmp_path) == ([], 0)
    first = RunJournal(tmp_path, "trainer serve", step=0, version=0)
    first.end("signal", "stopped by Ctrl-C", step=38)
    first.end("signal", "stopped by Ctrl-C", step=39)
    RunJournal(tmp_path, "trainer step", step=39, version=40)
    ended, runs = read_runs(tmp_path).runs
    assert (ended.ending, ended.detail, ended.at_step) == ("signal", "stopped by Ctrl-C", 39)
    assert (ended.from_step, runs.from_step, runs.from_version) == (0, 39, 40)
    assert (runs.command, runs.alive, runs.ended_at, runs.ending) == (
        "trainer step",
        True,
        None,
        None,
    )


def test_a_run_that_was_killed_has_no_end_and_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BEGIN, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        [running] = read_runs(tmp_path).runs
        assert (running.alive, running.ended_at) == (True, None)
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        [killed] = read_runs(tmp_path).runs
        assert (killed.alive, killed.ending) == (False, None)
    [killed] = read_runs(tmp_path).runs
    assert (killed.alive, killed.ending, killed.from_step) == (False, None, 39)


def test_a_line_that_lacks_something_is_passed_over(tmp_path: Path) -> None:
    RunJournal(tmp_path, "trainer serve", step=1, version=1)
    [file] = (tmp_path / "run").glob("*.jsonl")
    damaged = ['{"run": "x", "command": "trainer step"}', '{"run": "y", "command": "s", "at": "?"}']
    with file.open("a") as journal:
        journal.write("\n".join([*damaged, "[1]", '{"run": {}, "command": 1, "at": 2}', ""]))
        journal.write('{"run": "z", "command": "s", "at": 1, "from_step": Infinity}\n')
    later = RunJournal(tmp_path, "trainer step", step=2, version=2)
    with file.open("a") as journal:
        journal.write(json.dumps({"run": later._run, "ending": "error"}) + "\n")
    assert [run.from_step for run in read_runs(tmp_path).runs] == [1, 2]
    assert [run.ended_at for run in read_runs(tmp_path).runs] == [None, None]
    assert read_runs(tmp_path).damaged == 6


def test_another_process_with_the_pid_is_another() -> None:
    mine = process_identity()
    assert process_is_alive(mine)
    assert not process_is_alive({**mine, "process_start": mine["process_start"] - 1})
    assert process_is_alive({"pid": os.getpid()}), "as earlier versions wrote it"


def test_a_line_that_was_cut_short_costs_that_line_alone(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path, "trainer serve", step=1, version=1)
    journal.end("max_steps", "max_steps = 1 is reached", step=1)
    path = tmp_path / "run" / "journal.jsonl"
    path.write_text(path.read_text() + '{"run": "abc", "comm')
    RunJournal(tmp_path, "trainer serve", step=1, version=1).end("error", "port", step=None)
    assert [run.ending for run in read_runs(tmp_path).runs] == ["max_steps", "error"]
    assert path.stat().st_mode & 0o077 == 0


def test_of_many_runs_the_last_are_read(tmp_path: Path) -> None:
    for step in range(100):
        journal = RunJournal(tmp_path, "trainer step", step=step, version=step)
        journal.end("done", "x" * 1000, step=step)
    runs = read_runs(tmp_path).runs
    assert runs[-1].at_step == 99
    assert 10 <= len(runs) < 100
    assert all(json.dumps(run.as_json()) for run in runs)


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path, "trainer serve", step=0, version=0)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    (tmp_path / "run").write_text("a file")
    journal.end("error", "no space left", step=None)
    assert read_runs(tmp_path) == ([], 0)


def test_a_run_that_was_refused_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal.jsonl"
    refused = RunJournal(tmp_path, "trainer step", step=0, version=0)
    assert path.exists()
    refused.withdraw()
    assert not path.exists()
    RunJournal(tmp_path, "trainer serve", step=0, version=0)
    path.write_text(path.read_text() + '{"run": "abc", "comm')
    before = path.read_bytes()
    refused = RunJournal(tmp_path, "trainer step", step=0, version=0)
    assert path.read_bytes() != before
    refused.withdraw()
    assert path.read_bytes() == before
