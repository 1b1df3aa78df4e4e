"""AdamW over sharded parameters, its schedule by optimizer steps, and gradients' global norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .settings import OptimSettings


def make_optimizer(model: nn.Module, optim: OptimSettings) -> torch.optim.AdamW:
    """For what is trained of a sharded model. Only matrices decay: a norm's gain or a bias has
    no scale of its own that decay could undo (as in GPT-3, arXiv 2005.14165)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        foreach=True,
    )


def rate(optim: OptimSettings, steps: int) -> float:
    """The learning rate of the step that follows `steps` optimizer steps.

    By optimizer steps, never by rows or batches: how much a step holds may change.
    """
    if steps < optim.warmup_steps:
        return optim.lr * (steps + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    assert optim.decay_steps is not None
    done = min(1.0, (steps - optim.warmup_steps) / (optim.decay_steps - optim.warmup_steps))
    left = 1 - done if optim.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optim.lr * (optim.lr_floor + (1 - optim.lr_floor) * left)


def local_gradients(model: nn.Module) -> list[Tensor]:
    """This rank's shards of the gradients, reduced over ranks."""
    found = []
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is not None:
            found.append(grad.to_local() if isinstance(grad, DTensor) else grad)
    return found


def squared_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of this rank's shards, f64 scalar."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(gradients))
    return norms.to(device, torch.float64).square().sum()
