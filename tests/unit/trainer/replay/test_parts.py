"""Steps made with a value head's warm-up, of several updates, and of sums over split rollouts are
made again bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.trainer.step_samples import fill, train, trainer_settings
from tracegrad.store import Store
from tracegrad_trainer.replay.replay import ReplayRequest, replay

SEVERAL = {"lr": 1e-2, "minibatches": 2, "epochs": 2}
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
    settings = trainer_settings(tmp_path, **SETTINGS[name])
    with Store.open(settings.proxy.store) as store:
        fill(store, 4)
        train(settings, 2)
        for step in (1, 2):
            again = replay(store, settings.state_dir, ReplayRequest(step=step))
            assert again.equal, again.differing
