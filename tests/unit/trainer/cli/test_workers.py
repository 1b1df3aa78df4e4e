"""`trainer workers` as a process: what it starts, starts again and ends."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from support.proxy.servers import eventually
from support.store.events import rollout_events
from support.system.process_tree import ProcessTree
from support.trainer.step_samples import trainer_settings
from tracegrad.store import Store
from tracegrad_trainer.cli.status import collect_status
from tracegrad_trainer.cli.workers import run_workers
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.folder_lock import lock_for_command, lock_for_ranks
from tracegrad_trainer.launch.run_journal import RunJournal
from tracegrad_trainer.launch.run_state import RunState, read_state
from tracegrad_trainer.launch.session import NOTHING

WITHIN_S = 120.0
TRAINER = Path(sys.executable).parent / "trainer"


def scored(folder: Path, **changes: object) -> TrainerSettings:
    return trainer_settings(folder, rewards={"commands": {"resolved": "true"}}, **changes)


@contextmanager
def workers(settings: TrainerSettings) -> Iterator[subprocess.Popen[str]]:
    """With the same settings, started and not awaited."""
    sets = [f"model={settings.model}", f"state_dir={settings.state_dir}"]
    sets += ['rewards.commands={"resolved": "true"}', "batches.group_size=2"]
    process = subprocess.Popen(
        [str(TRAINER), "workers", *[f"--set={one}" for one in sets]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    family = ProcessTree(process.pid)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=WITHIN_S)
        assert process.returncode == 0, output
        assert output.splitlines()[-1] == "stopped by SIGTERM"
        assert family.gone(within_s=30) == []
    finally:
        family.end()
        process.kill()
        process.communicate()


def refused(settings: TrainerSettings) -> tuple[int, str]:
    """The exit code and what is printed, in this process."""
    out = io.StringIO()
    return run_workers(settings, Console(file=out, width=300)), out.getvalue()


def pid_of_scorers(settings: TrainerSettings) -> int | None:
    found = read_state(settings.state_dir, "scorers")
    return found["pid"] if found is not None and found["alive"] else None


def test_rollouts_are_scored_beside_ranks_of_another_launcher(tmp_path: Path) -> None:
    settings = scored(tmp_path)
    with (
        Store.open(settings.proxy.store) as store,
        lock_for_ranks(settings.state_dir),
        workers(settings),
    ):
        store.append(rollout_events("first", reward=None))
        eventually(lambda: store.rollout("first").summary.reward == 1.0, WITHIN_S)
        killed = pid_of_scorers(settings)
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: pid_of_scorers(settings) not in (killed, None), WITHIN_S)
        store.append(rollout_events("second", reward=None))
        eventually(lambda: store.rollout("second").summary.reward == 1.0, WITHIN_S)
        eventually(lambda: "scorers" in collect_status(store, settings.state_dir).parts, WITHIN_S)
        code, said = refused(settings)
        assert code == 1
        assert "is in use by trainer" in said


def test_where_there_is_no_work_nothing_is_started(tmp_path: Path) -> None:
    settings = trainer_settings(tmp_path)
    code, said = refused(settings)
    assert code == NOTHING
    assert "nothing to do" in said
    lock_for_command(settings.state_dir).close()


def test_a_wrong_setting_of_theirs_is_refused_before_anything_starts(tmp_path: Path) -> None:
    promotion = {"gate": "held_out", "tasks": tmp_path / "none.jsonl"}
    code, said = refused(trainer_settings(tmp_path, promotion=promotion))
    assert code == 1
    assert "promotion.tasks" in said
    assert "none.jsonl" in said


@pytest.mark.parametrize("there", [True, False])
def test_status_says_whom_ranks_of_another_launcher_miss(tmp_path: Path, there: bool) -> None:
    with Store.open(f"sqlite:///{tmp_path}/store.db") as store:
        RunJournal(tmp_path, "torchrun", step=0, version=0)
        RunState(tmp_path, "ranks").update(stage="waiting", workers=["scorers"])
        if there:
            RunState(tmp_path, "scorers").update(stage="working")
        assert collect_status(store, tmp_path).absent_workers == ([] if there else ["scorers"])
