"""The optimizer's settings, its schedule by optimizer steps, and what decays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from tracegrad_trainer.engine import OptimSettings
from tracegrad_trainer.engine.step.optimizer import (
    learning_rate,
    local_gradients,
    make_optimizer,
    squared_norm,
)


def rates(count: int, **settings: Any) -> list[float]:
    optim = OptimSettings(lr=2.0, **settings)
    return [learning_rate(optim, steps) for steps in range(count)]


def test_the_rate_stays_without_a_schedule() -> None:
    assert rates(3) == [2.0, 2.0, 2.0]
    assert rates(5, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_a_line_falls_from_the_warm_up_to_the_floor() -> None:
    found = rates(7, schedule="linear", decay_steps=4, lr_floor=0.2)
    assert found == pytest.approx([2.0, 1.6, 1.2, 0.8, 0.4, 0.4, 0.4])
    warm = rates(7, schedule="linear", warmup_steps=2, decay_steps=6, lr_floor=0.0)
    assert warm == pytest.approx([1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0])


def test_a_cosine_falls_slowly_then_fast_then_slowly() -> None:
    found = rates(6, schedule="cosine", decay_steps=4, lr_floor=0.0)
    # (1 + cos(pi k / 4)) / 2 x 2
    assert found == pytest.approx([2.0, 1.7071067811865475, 1.0, 0.2928932188134524, 0.0, 0.0])
    floored = rates(5, schedule="cosine", decay_steps=4, lr_floor=0.5)
    assert floored[2] == pytest.approx(1.5)
    assert floored[4] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "linear"}, "optim.schedule = 'linear' needs optim.decay_steps"),
        ({"decay_steps": 9}, "optim.decay_steps needs a schedule that decays"),
        (
            {"schedule": "cosine", "decay_steps": 5, "warmup_steps": 5},
            "optim.decay_steps = 5 must be more than optim.warmup_steps = 5",
        ),
        ({"betas": (0.9, 1.0)}, "optim.betas = (0.9, 1.0): each must be"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": float("inf")}, "lr"),
        ({"schedule": "exponential"}, "schedule"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        OptimSettings(**settings)
    assert message in str(caught.value)


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    model[0].weight.requires_grad_(True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, OptimSettings(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = dict(model.named_parameters())
    torch.testing.assert_close(after["0.weight"], before["0.weight"] * (1 - 0.1 * 0.5))
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(after[name], before[name]), name


def test_what_is_frozen_is_not_the_optimizers() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model, OptimSettings())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == 1
    assert held[0] is model[1].weight


def test_the_norm_is_over_all_gradients_together() -> None:
    model = nn.Linear(2, 1)
    cpu = torch.device("cpu")
    assert squared_norm(local_gradients(model.parameters()), cpu) == 0
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert squared_norm(local_gradients(model.parameters()), cpu) == pytest.approx(25)
    model.bias.grad = torch.tensor([12.0])
    assert squared_norm(local_gradients(model.parameters()), cpu) == pytest.approx(169)
