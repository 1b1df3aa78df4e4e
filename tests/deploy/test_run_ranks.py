"""deploy/run_ranks.py with a launcher of the test's in torchrun's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support.packages.wheel import ROOT
from support.proxy.servers import eventually
from tracegrad_trainer.launch.run_state import read_state

PROGRAM = ROOT / "deploy" / "run_ranks.py"
# Ends as torchrun does when its ranks have, and by a signal of its own.
TORCHRUN = """\
#!{python}
import json, os, pathlib, signal, subprocess, sys
here = pathlib.Path({here!r})
(here / "arguments").write_text(json.dumps([sys.argv[1:], os.environ["PYTHONSAFEPATH"]]))
signal.signal(signal.SIGTERM, lambda *_: ((here / "torchrun").touch(), os._exit(9)))
rank = subprocess.Popen([sys.executable, str(here / "rank.py")])
(here / "started").touch()
sys.exit(rank.wait())
"""
RANK = """\
import pathlib, signal, sys, time
from tracegrad_trainer.launch.run_state import RunState
here = pathlib.Path({here!r})
def finish(*_):
    (here / "asked").touch()
    time.sleep({step_s})  # the step under way
    (here / "finished").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, finish)
if {is_rank_zero}:
    RunState(here / "state", "ranks").update(stage="training")
(here / "ready").touch()
time.sleep(60)
"""


@contextmanager
def launched(
    here: Path, *options: str, is_rank_zero: bool = True, step_s: float = 0.3
) -> Iterator[subprocess.Popen[str]]:
    (here / "tracegrad.toml").write_text(f'state_dir = "{here / "state"}"\n')
    rank = RANK.format(here=str(here), is_rank_zero=is_rank_zero, step_s=step_s)
    (here / "rank.py").write_text(rank)
    torchrun = here / "torchrun-bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text(TORCHRUN.format(python=sys.executable, here=str(here)))
    torchrun.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(here / "tracegrad.toml"), *options],
        env={**os.environ, "PATH": f"{torchrun.parent}:{os.environ['PATH']}"},
        text=True,
        start_new_session=True,
    )
    try:
        eventually((here / "ready").exists)
        yield process
    finally:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def test_rank_zero_ends_its_step_before_the_launcher_ends(tmp_path: Path) -> None:
    with launched(tmp_path, "--standalone") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert (tmp_path / "finished").exists()
        assert not (tmp_path / "torchrun").exists()
    said = (tmp_path / "arguments").read_text()
    settings = tmp_path / "tracegrad.toml"
    assert said == (
        f'[["--standalone", "-m", "tracegrad_trainer.rl.serve_worker", "{settings}"], "1"]'
    )


def test_a_second_signal_is_the_launchers(tmp_path: Path) -> None:
    with launched(tmp_path, step_s=60) as process:
        process.send_signal(signal.SIGTERM)
        eventually((tmp_path / "asked").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 9
    assert not (tmp_path / "finished").exists()


def test_a_launcher_without_a_rank_zero_gets_the_signal_itself(tmp_path: Path) -> None:
    with launched(tmp_path, is_rank_zero=False) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 9
    assert (tmp_path / "torchrun").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_another_hosts_rank_zero_is_not_looked_for_here(tmp_path: Path, number: int) -> None:
    """The folder is one for all hosts; a process of that number may be anybody's here."""
    with launched(tmp_path, "--node-rank=1") as process:
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        assert not (tmp_path / "finished").exists()
        state = read_state(tmp_path / "state", "ranks")
        assert state is not None
        os.kill(state["pid"], signal.SIGTERM)  # as rank 0's host does
        assert process.wait(30) == 0


@pytest.mark.parametrize(("option", "stays"), [("--node-rank=0", True), ("--node-rank=1", False)])
def test_a_run_that_is_over_waits_to_be_stopped(tmp_path: Path, option: str, stays: bool) -> None:
    """Where rank 0 was; a launcher beside it ends, as that one may have been asked to."""
    with launched(tmp_path, option) as process:
        state = read_state(tmp_path / "state", "ranks")
        assert state is not None
        os.kill(state["pid"], signal.SIGTERM)  # it ends with 0, the launcher was not asked
        eventually((tmp_path / "finished").exists)
        if stays:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2)
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
