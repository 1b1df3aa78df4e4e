"""A state folder is one command's and one rank 0's, whoever started them."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.trainer.prepared_run import fill, save_smallest_model, settings_of, steps_of
from support.trainer.ranks import run_program
from tracegrad_trainer.launch import folder_lock
from tracegrad_trainer.launch.folder_lock import FolderLockedError, lock_for_command, lock_for_ranks
from tracegrad_trainer.launch.run_state import RunState, read_state
from tracegrad_trainer.rl import offline_worker


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "PATIENCE_S", 0.2)


def test_one_command_at_a_time(tmp_path: Path) -> None:
    with (
        lock_for_command(tmp_path),
        pytest.raises(
            FolderLockedError, match=rf"^state_dir: {tmp_path} is in use by .*\(pid \d+\)"
        ),
    ):
        lock_for_command(tmp_path)
    lock_for_command(tmp_path).close()


def test_a_command_does_not_start_beside_ranks_that_were_started_by_hand(tmp_path: Path) -> None:
    with lock_for_ranks(tmp_path), pytest.raises(FolderLockedError, match="take another folder"):
        lock_for_command(tmp_path)
    lock_for_command(tmp_path).close()


def test_a_command_and_its_ranks_share_the_folder(tmp_path: Path) -> None:
    with lock_for_command(tmp_path), lock_for_ranks(tmp_path), pytest.raises(FolderLockedError):
        lock_for_ranks(tmp_path)


def test_ranks_started_by_hand_leave_a_folder_in_use_as_it_is(tmp_path: Path) -> None:
    settings = settings_of(save_smallest_model(tmp_path / "model"), tmp_path / "state")
    settings.state_dir.mkdir()
    fill(settings.proxy.store, groups=2)
    file = tmp_path / "settings.json"
    file.write_text(settings.model_dump_json())
    RunState(settings.state_dir, "ranks").update(stage="training")
    arguments = [str(file), "--steps", "1"]
    with lock_for_ranks(settings.state_dir):
        code, written = run_program(offline_worker.main, arguments)
    assert code == 1
    [line] = [line for line in written.splitlines() if "in use" in line]
    assert line.startswith(f"FolderLockedError: state_dir: {settings.state_dir} is in use by ")
    assert "Traceback" not in written
    state = read_state(settings.state_dir, "ranks")
    assert state is not None
    assert state["stage"] == "training", "the other one's state is its own"
    code, written = run_program(offline_worker.main, arguments)
    assert code == 0, written
    assert len(steps_of(settings.proxy.store)) == 1
