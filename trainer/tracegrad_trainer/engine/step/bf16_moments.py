"""AdamW whose moments are kept in bfloat16: 4 bytes a parameter less of each two."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import AdamW, adamw

from tracegrad_trainer.engine.model.sharded_load import local_index

MOMENTS = ("exp_avg", "exp_avg_sq")


class Bf16MomentsAdamW(AdamW):
    """Each update is torch's own in float32, of one parameter after the other: beside the weights
    and both moments, four numbers of 4 bytes for each of the largest parameter's shard are there at
    a time. State and checkpoints are as AdamW's but for their type; those in float32 load, rounded.

    Moments are rounded up or down by chance, in proportion to what is nearer: to the nearest alone,
    one that decays by less than half of its last bit (in a step of a small share, where gradients
    have become small) would not decay at all. What chance says follows from the step and the
    place in the whole parameter: the same on every layout, in a replay, and for all replicas.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        first, second = state["exp_avg"].float(), state["exp_avg_sq"].float()
        adamw(
            [parameter],
            [parameter.grad],  # type: ignore[list-item]
            [first],
            [second],
            [],
            [state["step"]],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        dither = _dither(parameter, state["step"])
        _round_to(state["exp_avg"], first, dither & 0xFFFF)
        _round_to(state["exp_avg_sq"], second, (dither >> 16) & 0xFFFF)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Past torch's own, which casts all moments to the parameters' type at once."""
        saved = state_dict["state"]
        others = {
            key: {name: value for name, value in state.items() if name not in MOMENTS}
            for key, state in saved.items()
        }
        super().load_state_dict(state_dict | {"state": others})
        for theirs, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, parameter in zip(theirs["params"], group["params"], strict=True):
                for name in MOMENTS:
                    kept = saved[key][name].to(parameter.device, torch.bfloat16)
                    self.state[parameter][name] = kept


def _dither(parameter: Tensor, step: Tensor) -> Tensor:
    """i32 of the local shard: 32 bits that look random, by an element's number in the parameter and
    by the step (the mixing of MurmurHash3)."""
    local, first = _local(parameter), 0
    if isinstance(parameter, DTensor):  # a shard is of whole rows
        rows = local_index(parameter)[:1]
        first = rows[0].start * math.prod(parameter.shape[1:]) if rows else 0
    bits = torch.arange(local.numel(), dtype=torch.int32, device=local.device)
    bits += _signed(first)
    count = step.to(local.device, torch.float32).reshape(1).clone()
    bits ^= _mixed(count.view(torch.int32))
    return _mixed(bits).view(local.shape)


def _mixed(bits: Tensor) -> Tensor:
    """Of i32, which wraps; in place."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits ^= (bits >> shift) & ((1 << (32 - shift)) - 1)  # of i32 the sign comes from above
        bits *= _signed(factor)
    return bits


def _signed(number: int) -> int:
    """As i32 holds its last 32 bits."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _round_to(kept: Tensor, exact: Tensor, dither: Tensor) -> None:
    """Of the 16 bits that a bfloat16 lacks, what `dither` adds carries into the others or not."""
    bits = _local(exact).view(torch.int32)
    bits += dither
    bits &= -0x10000
    kept.copy_(exact)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
