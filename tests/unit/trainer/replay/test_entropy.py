"""A step made with an adapted coefficient is made again with the same, after a restart too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.trainer.step_samples import fill, train, trainer_settings
from tracegrad.store import StepHistory, Store
from tracegrad_trainer.replay.replay import ReplayRequest, replay

OBJECTIVE = {"preset": "grpo", "entropy_coef": 0.05, "entropy_target": 3.0, "entropy_rate": 0.5}


def taken(folder: Path, *parts: int) -> list[dict[str, Any]]:
    """Metrics of steps, taken by as many trainers one after the other."""
    settings = trainer_settings(folder, objective=OBJECTIVE)
    with Store.open(settings.proxy.store) as store:
        fill(store, 6)
        for steps in parts:
            train(settings, steps)
        found = sorted(StepHistory(store).steps(), key=lambda one: one.step)
        again = replay(store, settings.state_dir, ReplayRequest(step=3))
        assert again.equal, again.differing
        assert "entropy_coef" in again.compared
    clock = ("seconds", "tokens_per_second", "mfu")
    return [{k: v for k, v in one.metrics.items() if k not in clock} for one in found]


def test_replay_and_restart_go_on_with_the_adapted_coefficient(tmp_path: Path) -> None:
    whole = taken(tmp_path / "whole", 3)
    coefs = [one["entropy_coef"] for one in whole]
    assert coefs[0] == 0.05
    assert len(set(coefs)) == 3
    assert taken(tmp_path / "parts", 1, 2) == whole
