"""How commands and their ranks are stopped."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.proxy.servers import eventually
from support.trainer.step_samples import trainer_settings
from tracegrad_trainer.config.trainer import TrainerSettings
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


def report(settings: TrainerSettings, ranks: ChildProcess, **fields: object) -> None:
    """As rank 0 does, which is `ranks` itself."""
    RunState(settings.state_dir, "ranks").update(pid=ranks.pid, process_start=None, **fields)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Signals do afterwards what they did before."""
    before = {each: signal.getsignal(each) for each in session.STOP_SIGNALS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize(
    ("pending", "written", "said"),
    [
        ([], False, []),
        ([5], True, ["stopping: the step under way ends first (at most 600 s)"]),
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
    report(settings, ranks, pending=pending)
    heard: list[str] = []
    session.stop_ranks(ranks, settings, heard.append)
    assert ranks.exit_code() is not None
    assert (tmp_path / "written").exists() == written
    assert heard == said


@pytest.mark.parametrize("number", session.STOP_SIGNALS)
def test_a_second_signal_ends_ranks_at_once_and_one_sent_twice_is_one(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SAME_SIGNAL_S", 3600.0)
    settings = trainer_settings(tmp_path)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ranks = ChildProcess("ranks", command, log=tmp_path / "log")
    ranks.start()
    eventually((tmp_path / "up").exists, 60)
    session.on_second_signal(ranks.kill)
    signal.raise_signal(number)
    assert ranks.exit_code() is None, "the same wish"
    monkeypatch.setattr(session, "SAME_SIGNAL_S", 0.0)
    signal.raise_signal(number)
    session.stop_ranks(ranks, settings, lambda _: None)
    assert ranks.exit_code() == -signal.SIGKILL
    assert not (tmp_path / "written").exists()


# Ends with its rank, which has a session of its own; of a signal it kills it, as torch's launcher
# does after 30 s.
LAUNCHER = """
import signal, subprocess, sys

rank = subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True)

def end(*_):
    rank.kill()
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
sys.exit(rank.wait())
"""
RANK = (
    "from tracegrad_trainer.launch.run_state import RunState\nimport pathlib, sys\nRunState("
    "pathlib.Path(sys.argv[2]), 'ranks').update(stage=sys.argv[3], pending=[])\n" + PROGRAM
)


def test_the_launchers_own_patience_is_not_the_ranks(tmp_path: Path) -> None:
    """With a step under way, and none that waits for its checkpoint."""
    settings = trainer_settings(tmp_path)
    (tmp_path / "rank.py").write_text(RANK)
    files = [str(each) for each in (tmp_path / "rank.py", tmp_path, settings.state_dir)]
    command = [sys.executable, "-c", LAUNCHER, *files, "training"]
    ranks = ChildProcess("ranks", command, log=tmp_path / "log")
    ranks.start()
    eventually((tmp_path / "up").exists, 60)
    session.stop_ranks(ranks, settings, lambda _: None)
    assert ranks.exit_code() == 0
    assert (tmp_path / "written").exists()


@pytest.mark.parametrize("stage", ["training", "pushing", "waiting"])
def test_a_step_under_way_has_that_time_too(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RANKS_GRACE_S", 0.0)
    settings = trainer_settings(tmp_path)
    ranks = ChildProcess(
        "ranks", [sys.executable, "-c", PROGRAM, str(tmp_path)], log=tmp_path / "log"
    )
    ranks.start()
    eventually((tmp_path / "up").exists, 60)
    report(settings, ranks, stage=stage, pending=[])
    session.stop_ranks(ranks, settings, lambda _: None)
    # Behind a step, a push finds it pending; the first push of all has nothing to lose.
    assert (tmp_path / "written").exists() == (stage == "training")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_that_a_finalizer_swallows_comes_again(number: signal.Signals) -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(number)

    swallowed = []

    def work() -> None:
        made = Finalized()
        del made
        swallowed.append(True)
        time.sleep(60)

    with pytest.raises(session.StopRequested), session.raising_on_stop_signals():
        work()
    assert swallowed
