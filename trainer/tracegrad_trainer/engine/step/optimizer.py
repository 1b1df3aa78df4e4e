"""AdamW over sharded parameters, its schedule by optimizer steps, and gradients' global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tracegrad_trainer.engine.config import ADAMW, AdamwImplementation, OptimSettings
from tracegrad_trainer.engine.model import value_head
from tracegrad_trainer.engine.step.bf16_moments import MOMENTS, Bf16MomentsAdamW


def make_optimizer(
    model: nn.Module, optim: OptimSettings, implementation: AdamwImplementation = ADAMW
) -> torch.optim.AdamW:
    """For what is trained of a sharded model; a value head has groups of its own. Only matrices
    decay: a norm's gain or a bias has no scale of its own that decay could undo (as in GPT-3,
    arXiv 2005.14165)."""
    policy, critic = trained_parameters(model)
    groups = [
        {"params": some, "weight_decay": decay}
        for parameters in (policy, critic)
        for some, decay in (
            ([p for p in parameters if p.ndim >= 2], optim.weight_decay),
            ([p for p in parameters if p.ndim < 2], 0.0),
        )
    ]
    halved = optim.moments == "bfloat16"
    kind = Bf16MomentsAdamW if halved else torch.optim.AdamW
    optimizer = kind(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        **{implementation: True},
    )
    _start_state(optimizer, torch.bfloat16 if halved else None)
    return optimizer


@torch.no_grad()
def _start_state(optimizer: torch.optim.AdamW, moments: torch.dtype | None) -> None:
    """As a first step would make it, with moments of this type, by default of the parameters'.

    To load a checkpoint into an optimizer without a state, torch takes a step on gradients of all
    parameters (`_init_optim_state`): memory that may have been given to vLLM.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            # Fused kernels read it on the device.
            device = parameter.device if group["fused"] else None
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=moments)


def set_implementation(optimizer: torch.optim.AdamW, implementation: AdamwImplementation) -> None:
    """After a state was loaded, which brings along what it was made with."""
    for group in optimizer.param_groups:
        for one in ("fused", "foreach"):  # the other is None, as the optimizer itself has it
            group[one] = one == implementation or None
    for parameter, state in optimizer.state.items():
        if "step" in state and implementation == "fused":  # its kernels read it on the device
            state["step"] = state["step"].to(parameter.device)


def clear_momentum(optimizer: torch.optim.AdamW) -> None:
    """The first moments of zero, as before any step; the second ones, which are the gradients'
    sizes, and the count of steps stay. The next updates begin small: a share 1 - beta of a
    step."""
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def trained_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What is trained: of the policy, and of the value head."""
    policy: list[nn.Parameter] = []
    critic: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (critic if value_head.is_value_parameter(name) else policy).append(parameter)
    return policy, critic


def learning_rate(optim: OptimSettings, steps: int) -> float:
    """The learning rate of the step that follows `steps` optimizer steps of the policy.

    By optimizer steps, never by rows or batches: how much a step holds may change.
    """
    return optim.lr * _schedule(optim, steps)


def value_learning_rate(optim: OptimSettings, steps: int) -> float:
    """The same of the value head, by its optimizer steps."""
    return (optim.lr if optim.value_lr is None else optim.value_lr) * _schedule(optim, steps)


def _schedule(optim: OptimSettings, steps: int) -> float:
    """Share of the learning rate, 0 to 1."""
    if steps < optim.warmup_steps:
        return (steps + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return 1.0
    assert optim.decay_steps is not None
    done = min(1.0, (steps - optim.warmup_steps) / (optim.decay_steps - optim.warmup_steps))
    left = 1 - done if optim.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optim.lr_floor + (1 - optim.lr_floor) * left


def apply_share_of_step(optimizer: torch.optim.AdamW, share: float) -> None:
    """AdamW's update at `share` (above 0, at most 1) of a step: the weights move by share x rate,
    and both moments decay by beta ** share, so that this gradient weighs `share` in them as well.

    Smaller gradients would not do: AdamW divides by their size. A smaller rate alone would not
    either: nine tenths of what a gradient moves (beta 0.9) it moves in later steps, at their rate.
    So as many steps as make up a whole one leave the moments as it does, of equal gradients.
    With share 1 this is `optimizer.step()`, bit for bit.

    torch corrects the moments' bias by beta ** steps; it counts in steps of this share meanwhile,
    so that the exponent is the sum of all shares.
    """
    if share == 1:
        optimizer.step()
        return
    betas = [group["betas"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["betas"] = tuple(beta**share for beta in group["betas"])
    for state in optimizer.state.values():
        state["step"].div_(share)
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].mul_(share)
    for group, own in zip(optimizer.param_groups, betas, strict=True):
        group["betas"] = own


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shards of their gradients, reduced over ranks."""
    found = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            found.append(grad.to_local() if isinstance(grad, DTensor) else grad)
    return found


def copies_of_shards(model: nn.Module) -> int:
    """How many ranks hold the same shards: replicas of the model (HSDP)."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
            return math.prod(size for placement, size in sizes if placement.is_replicate())
    return 1


def squared_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of this rank's shards, f64 scalar."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(gradients))
    return norms.to(device, torch.float64).square().sum()
