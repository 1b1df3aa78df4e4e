"""`tracegrad import` of the folders that Harbor leaves of trials and jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tracegrad.cli.app import app
from tracegrad.store import Store

TRAJECTORY: dict[str, Any] = {
    "schema_version": "ATIF-v1.6",
    "agent": {"name": "terminus-2", "version": "2.0.0"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "Make hello.txt"},
        {"step_id": 2, "source": "agent", "message": "Done."},
    ],
}


def write_trial(folder: Path, *, rewards: object = None, **changes: object) -> Path:
    """As Harbor 0.25 does; `changes`: of the trajectory."""
    (folder / "agent").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    verified = None if rewards is None else {"rewards": rewards}
    result = {"task_name": "make-hello", "trial_name": folder.name, "verifier_result": verified}
    (folder / "result.json").write_text(json.dumps(result, indent=2))
    trajectory = json.dumps({**TRAJECTORY, "session_id": folder.name, **changes}, indent=2)
    (folder / "agent" / "trajectory.json").write_text(trajectory)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'target.db'}") as opened:
        yield opened


def run(store: Store, *arguments: object) -> Result:
    url = f"sqlite:///{store.database.describe()}"
    return CliRunner().invoke(
        app, ["import", *map(str, arguments)], env={"TRACEGRAD_STORE": url, "COLUMNS": "200"}
    )


@pytest.mark.parametrize(
    ("rewards", "reward"),
    [
        ({"reward": 1}, 1.0),
        ({"tests": 0.5}, 0.5),
        ({"tests": 0.5, "style": 1}, None),  # it does not say which
        (None, None),
    ],
)
def test_a_trial_has_its_task_and_its_reward(
    rewards: object, reward: float | None, store: Store, tmp_path: Path
) -> None:
    trial = write_trial(tmp_path / "make-hello__a", rewards=rewards)
    assert run(store, trial).stdout.startswith("1 rollout: 1 new, 1 new turn")
    assert run(store, trial).stdout == "1 rollout: 0 new\n"
    [row] = store.rollouts()
    assert (row.task_id, row.agent, row.reward) == ("make-hello", "terminus-2", reward)


def test_what_a_trajectory_says_itself_stands(store: Store, tmp_path: Path) -> None:
    said = {"reward": 0.25, "task_id": "other", "kept": "yes"}
    run(store, write_trial(tmp_path / "a", rewards={"reward": 1}, extra=said))
    [row] = store.rollouts()
    assert (row.task_id, row.reward) == ("other", 0.25)


def test_a_job_is_all_its_trials_and_says_which_is_broken(store: Store, tmp_path: Path) -> None:
    job = tmp_path / "job"
    for name, reward in (("t__a", 0), ("t__b", 1), ("t__c", 1)):
        write_trial(job / name, rewards={"reward": reward})
    (job / "result.json").write_text("{}")
    (job / "t__b" / "agent" / "trajectory.json").unlink()
    done = run(store, job)
    assert done.exit_code == 1
    assert "t__b/agent/trajectory.json: trajectory: this trial has none" in done.stderr
    assert "--skip-bad" in done.stderr
    counts, left_out = run(store, job, "--skip-bad").stdout.splitlines()
    assert counts == "2 rollouts: 1 new, 1 new turn, 1 new reward"
    assert left_out == "left out: trajectory (1)"
    assert sorted(row.reward or 0.0 for row in store.rollouts()) == [0.0, 1.0]


def test_a_broken_file_is_named(store: Store, tmp_path: Path) -> None:
    trial = write_trial(tmp_path / "a", rewards={"reward": 1})
    (trial / "result.json").write_text("{")
    done = run(store, trial)
    assert done.exit_code == 1
    assert "it is no JSON" in done.stderr


def test_another_folder_is_refused_with_what_is_known(store: Store, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    done = run(store, tmp_path / "files")
    assert done.exit_code == 1
    assert "no folder of a known format (harbor); name the files in it" in done.stderr
