"""Steps made with a value head's warm-up, of several updates, of sums over split rollouts and with
an adapted coefficient are made again bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.trainer.step_samples import SEVERAL, fill, train, trained, trainer_settings
from tracegrad.store import StepHistory, Store
from tracegrad_trainer.replay.replay import ReplayRequest, replay

SETTINGS: dict[str, dict[str, Any]] = {
    # Of four updates of the first step three are the value head's alone.
    "warm-up": {
        "objective": {"preset": "ppo", "gae_level": "turn", "ratio": "sequence"},
        "optim": {**SEVERAL, "value_lr": 3e-2, "value_warmup_steps": 3},
    },
    "products": {
        "objective": {
            "preset": "grpo",
            "ratio": "sequence",
            "correction_level": "sequence_product",
            "aggregation": "group_mean",
            "entropy_coef": 0.05,
            "entropy_target": 3.0,
        },
        "optim": SEVERAL,
    },
    "alone": {
        "objective": {"preset": "ppo"},
        "optim": {"lr": 1e-2, "value_warmup_steps": 1},
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_is_made_again(tmp_path: Path, name: str) -> None:
    settings = trained(tmp_path, 4, 2, **SETTINGS[name])
    with Store.open(settings.proxy.store) as store:
        for step in (1, 2):
            again = replay(store, settings.state_dir, ReplayRequest(step=step))
            assert again.equal, again.differing


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
