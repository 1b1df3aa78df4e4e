"""Generalized advantage estimation over the sampled tokens of rows."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


@torch.no_grad()
def gae(
    value: Float[Tensor, " n"],
    reward: Float[Tensor, " n"],
    row: Int[Tensor, " n"],
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Advantages and returns (advantage + value) of n targets (GAE, arXiv 1506.02438).

    delta_t = r_t + gamma V' - V_t, A_t = sum over k of (gamma lam)^k delta_{t+k}. V' is the value
    at the next *target of the same row*: tokens that were observed, not sampled, are skipped,
    and behind a row's last target it is 0. Targets of a row stand together, in order. Neither
    result carries a gradient.
    """
    n = len(value)
    if n == 0:
        return value.detach().clone(), value.detach().clone()
    assert value.shape == reward.shape == row.shape
    goes_on = torch.zeros(n, dtype=torch.bool, device=value.device)
    goes_on[:-1] = row[1:] == row[:-1]
    following = torch.where(goes_on, value.roll(-1), 0)
    delta = reward + gamma * following - value
    # A scan backwards over tens of thousands of scalars: on a device every one would be a launch.
    sums, on = delta.double().tolist(), goes_on.tolist()
    decay, last = gamma * lam, 0.0
    for t in range(n - 1, -1, -1):
        last = sums[t] = sums[t] + (decay * last if on[t] else 0.0)
    advantage = torch.tensor(sums, dtype=value.dtype, device=value.device)
    return advantage, advantage + value
