"""How ranks are stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.proxy.servers import eventually
from support.trainer.step_samples import trainer_settings
from tracegrad_trainer.launch import session
from tracegrad_trainer.launch.run_state import RunState
from tracegrad_trainer.utils.subprocesses import ChildProcess

# Says that it is up, and takes its time to end.
PROGRAM = """
import pathlib, signal, sys, time

def end(*_):
    time.sleep(1)
    pathlib.Path(sys.argv[1], "written").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1], "up").touch()
signal.pause()
"""


@pytest.mark.parametrize(
    ("pending", "written", "said"),
    [
        ([], False, []),
        ([5], True, []),
        ([5, 6, 7], True, ["stopping: steps 5 to 7 get their checkpoint first (at most 600 s)"]),
    ],
)
def test_ranks_with_steps_that_no_checkpoint_has_may_take_their_time(
    pending: list[int],
    written: bool,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "RANKS_GRACE_S", 0.0)
    settings = trainer_settings(tmp_path)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ranks = ChildProcess("ranks", command, log=tmp_path / "log")
    ranks.start()
    eventually((tmp_path / "up").exists, 60)
    RunState(settings.state_dir, "ranks").update(pending=pending)
    heard: list[str] = []
    session.stop_ranks(ranks, settings, heard.append)
    assert ranks.exit_code() is not None
    assert (tmp_path / "written").exists() == written
    assert heard == said
