"""The scorers as a part of `trainer serve`: by its settings, and started again when they end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from support.proxy.servers import eventually
from support.store.events import rollout_events
from support.trainer import scorers
from support.trainer.step_samples import trainer_settings
from tracegrad.store import Store
from tracegrad_trainer.cli.serve import check_startup
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.run_state import is_at_work
from tracegrad_trainer.launch.session import StartError, write_resolved_settings
from tracegrad_trainer.launch.supervisor import Backoff, Part, Supervisor
from tracegrad_trainer.launch.workers import SCORERS, worker_process

WITHIN_S = 120.0


def settings_with(folder: Path, **rewards: Any) -> TrainerSettings:
    return trainer_settings(folder, rewards=rewards)


def test_they_read_the_runs_settings_and_are_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setenv(scorers.CALLS, str(tmp_path / "calls"))
    settings = settings_with(
        tmp_path, functions=["support.trainer.scorers:by_turns"], weights={"by_turns": 0.5}
    )
    (settings.state_dir / "run").mkdir(parents=True)
    process = worker_process(SCORERS, settings, write_resolved_settings(settings))

    def ready() -> bool:
        return is_at_work(settings.state_dir, SCORERS, process.pid)

    said: list[str] = []
    part = Part(process, Backoff(5), ready, ready)
    supervisor = Supervisor([part], WITHIN_S, say=said.append)

    def up_again() -> bool:
        supervisor.tick()
        return part.restarts == 1 and part.is_up

    with Store.open(settings.proxy.store) as store:
        process.start()
        try:
            process.wait_until_ready(ready, timeout_s=WITHIN_S)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            eventually(up_again, WITHIN_S)
            assert "scorers (pid" in said[0]
            store.append(rollout_events("r", reward=None))
            eventually(lambda: store.rollout("r").summary.reward == 1.0, WITHIN_S)
        finally:
            process.stop()


def test_a_judge_without_its_key_is_refused_before_anything_starts(tmp_path: Path) -> None:
    judge = {"url": "http://h/v1", "model": "m", "rubric": "r", "key_variable": "NO_SUCH_KEY"}
    settings = settings_with(tmp_path, judge=judge)
    with (
        Store.open(settings.proxy.store) as store,
        pytest.raises(StartError, match=r"judge\.key_variable: NO_SUCH_KEY is not set"),
    ):
        check_startup(settings, store)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batches": {"group_size": 1}, "objective": {"advantage": "running"}},
         "rewards.judge compares the rollouts of a group, and batches.group_size is 1"),
        ({"objective": {"judge": "support.trainer.scorers:parts"}}, "objective.judge gives"),
    ],
)  # fmt: skip
def test_what_a_judge_does_not_go_with(tmp_path: Path, changes: Any, said: str) -> None:
    judge = {"url": "http://h/v1", "model": "m", "rubric": "r"}
    with pytest.raises(ValueError, match=said):
        trainer_settings(tmp_path, rewards={"judge": judge}, **changes)
