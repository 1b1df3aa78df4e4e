"""AdamW whose moments are kept in bfloat16: 4 bytes a parameter less of each two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import AdamW, adamw


class Bf16MomentsAdamW(AdamW):
    """Each update is torch's own in float32, of one parameter after the other: beside the weights
    and both moments, two float32 copies of the largest parameter's shard are there at a time.
    State and checkpoints are as AdamW's but for their type; those in float32 load, rounded.
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
        if not state:
            # Fused kernels read it on the device.
            device = parameter.device if group["fused"] else None
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
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
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # which casts moments to the parameter's type
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name] = state[name].to(torch.bfloat16)
