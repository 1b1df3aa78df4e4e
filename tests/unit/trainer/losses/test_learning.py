"""Every preset learns the toy on three seeds; its controls learn nothing."""

from __future__ import annotations

import numpy as np
import pytest

from support.trainer.loss_toy import learn
from tracegrad_trainer.losses import PRESETS, preset

SEEDS = range(3)
# One of each kind at every run, all of them in the long form.
QUICK = ("grpo", "gspo", "ppo", "ipa", "dpo")
EACH = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in PRESETS
]


@pytest.mark.parametrize("name", EACH)
def test_reward_rises_on_three_seeds(name: str) -> None:
    for seed in SEEDS:
        before, after = learn(preset(name), seed)
        assert before < 0.35
        assert after > 0.85


@pytest.mark.parametrize("name", EACH)
def test_with_shuffled_rewards_it_does_not(name: str) -> None:
    runs = [learn(preset(name), seed, shuffled=True) for seed in SEEDS]
    assert abs(np.mean([after - before for before, after in runs])) < 0.15


@pytest.mark.parametrize("name", EACH)
def test_without_a_learning_rate_it_does_not(name: str) -> None:
    before, after = learn(preset(name), 0, steps=1, lr=0.0)
    assert before == after
