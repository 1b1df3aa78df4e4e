"""The value head's own learning rate, and the steps in which it learns alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.trainer import layout_ranks
from support.trainer.fsdp_ranks import VERSION
from support.trainer.layout_ranks import Layout, share
from support.trainer.learners import save_checkpoint
from tracegrad_trainer.engine import Learner, OptimSettings, load_checkpoint
from tracegrad_trainer.engine.step.optimizer import learning_rate, value_learning_rate
from tracegrad_trainer.losses import preset


def full(learner: Learner) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in learner.model.named_parameters()}  # type: ignore[attr-defined]


def step(learner: Learner) -> Any:
    return learner.train(share("ppo", Layout()), version=VERSION)


def test_the_rates_by_hand() -> None:
    optim = OptimSettings(
        lr=2.0, value_lr=10.0, warmup_steps=2, schedule="linear", decay_steps=4, lr_floor=0.0
    )
    assert [learning_rate(optim, n) for n in range(5)] == pytest.approx([1, 2, 2, 1, 0])
    assert [value_learning_rate(optim, n) for n in range(5)] == pytest.approx([5, 10, 10, 5, 0])
    assert value_learning_rate(OptimSettings(lr=2.0), 7) == 2.0


def test_each_learns_at_its_own_rate(folder: Path, one_rank: None) -> None:
    """The first step of Adam goes as far as the rate, wherever there is a gradient."""
    learner = layout_ranks.learner(folder, "ppo", lr=1e-3, value_lr=5e-2, eps=1e-12)
    before = full(learner)
    done = step(learner)
    after = full(learner)
    far = {name: float((after[name] - before[name]).abs().max()) for name in after}
    assert far["value_head.bias"] == pytest.approx(5e-2, rel=1e-3)
    assert far["value_head.weight"] == pytest.approx(5e-2, rel=1e-3)
    rest = {name: d for name, d in far.items() if not name.startswith("value_head")}
    assert max(rest.values()) == pytest.approx(1e-3, rel=1e-3)
    assert (done.metrics["lr"], done.metrics["value_lr"]) == (1e-3, 5e-2)
    assert done.metrics["updates_value_only"] == 0
    assert done.policy_moved


def test_without_a_rate_of_its_own_it_has_the_policys(folder: Path, one_rank: None) -> None:
    done = step(layout_ranks.learner(folder, "ppo", lr=1e-3))
    assert done.metrics["value_lr"] == done.metrics["lr"] == 1e-3
    assert "value_lr" not in step_of_no_values(folder).metrics


def step_of_no_values(folder: Path) -> Any:
    learner = layout_ranks.learner(folder, "turn_mean", value_warmup_steps=3)
    done = learner.train(share("turn_mean", Layout()), version=VERSION)
    assert done.policy_moved
    return done


def test_in_its_warm_up_the_value_head_learns_alone(folder: Path, one_rank: None) -> None:
    optim = {"lr": 1e-3, "value_warmup_steps": 2, "weight_decay": 0.1, "eps": 1e-12}
    learner = layout_ranks.learner(folder, "ppo", **optim)
    start = full(learner)
    for _ in range(2):
        before = full(learner)
        done = step(learner)
        after = full(learner)
        assert done.applied
        assert not done.policy_moved
        assert (done.metrics["lr"], done.metrics["value_lr"]) == (0.0, 1e-3)
        assert done.metrics["updates_value_only"] == done.metrics["updates"] == 1
        assert not torch.equal(after["value_head.weight"], before["value_head.weight"])
    for name, tensor in full(learner).items():
        assert torch.equal(tensor, start[name]) == (not name.startswith("value_head")), name
    assert step(learner).policy_moved
    # The policy's first step is Adam's first: as far as the rate, with no moments from before.
    after = full(learner)
    name = "model.layers.0.mlp.up_proj.weight"
    decayed = start[name] * (1 - 1e-3 * 0.1)
    assert float((after[name] - decayed).abs().max()) == pytest.approx(1e-3, rel=1e-3)


def test_an_entropy_bonus_does_not_adapt_to_a_policy_that_does_not_learn(
    folder: Path, one_rank: None
) -> None:
    learner = layout_ranks.learner(folder, "ppo", value_warmup_steps=1)
    learner.objective = preset("ppo", entropy_coef=0.05, entropy_target=9.0)
    learner.entropy_coef = 0.05
    step(learner)
    assert learner.entropy_coef == 0.05
    step(learner)
    assert learner.entropy_coef > 0.05


def test_clipping_in_the_warm_up_is_by_the_value_heads_gradient(
    folder: Path, one_rank: None
) -> None:
    alone = step(layout_ranks.learner(folder, "ppo", value_warmup_steps=1))
    together = step(layout_ranks.learner(folder, "ppo"))
    assert 0 < alone.metrics["grad_norm"] < together.metrics["grad_norm"]
    assert alone.metrics["policy_loss"] == together.metrics["policy_loss"]


def test_a_resume_in_the_warm_up_is_bit_by_bit_the_run_that_went_on(
    folder: Path, tmp_path: Path, one_rank: None
) -> None:
    optim = {"lr": 1e-3, "value_lr": 1e-2, "value_warmup_steps": 2}
    one = layout_ranks.learner(folder, "ppo", **optim)
    step(one)
    save_checkpoint(one, tmp_path, 1, {}, keep=1)
    other = layout_ranks.learner(folder, "ppo", **optim)
    load_checkpoint(other, tmp_path / "step-00000001")
    for _ in range(2):
        assert step(one) == step(other)
    expected = full(one)
    for name, tensor in full(other).items():
        assert torch.equal(tensor, expected[name]), name
