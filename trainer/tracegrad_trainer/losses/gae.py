"""Generalized advantage estimation: over a rollout's sampled tokens, or over its turns."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from tracegrad_trainer.losses.tokens import PerToken, TokenIndex

Numbers = NDArray[np.float64]
Whole = NDArray[np.int64]


@torch.no_grad()
def gae(
    value: PerToken, reward: PerToken, rollout: TokenIndex, *, gamma: float, lam: float
) -> tuple[PerToken, PerToken]:
    """Advantages and returns (advantage + value) of n targets (GAE, arXiv 1506.02438).

    delta_t = r_t + gamma V' - V_t, A_t = sum over k of (gamma lam)^k delta_{t+k}. V' is the value
    at the next *target of the same rollout*: tokens that were observed, not sampled, are skipped,
    and behind a rollout's last target it is 0. Targets of a rollout stand together, in order.
    Neither result carries a gradient.
    """
    n = len(value)
    if n == 0:
        return value.detach().clone(), value.detach().clone()
    assert value.shape == reward.shape == rollout.shape
    goes_on = torch.zeros(n, dtype=torch.bool, device=value.device)
    goes_on[:-1] = rollout[1:] == rollout[:-1]
    following = torch.where(goes_on, value.roll(-1), 0)
    delta = reward + gamma * following - value
    # A scan backwards over tens of thousands of scalars: on a device every one would be a launch.
    sums, on = delta.double().tolist(), goes_on.tolist()
    decay, last = gamma * lam, 0.0
    for t in range(n - 1, -1, -1):
        last = sums[t] = sums[t] + (decay * last if on[t] else 0.0)
    advantage = torch.tensor(sums, dtype=value.dtype, device=value.device)
    return advantage, advantage + value


def gae_of_turns(
    value: Numbers, reward: Numbers, rollout: Whole, number: Whole, *, gamma: float, lam: float
) -> tuple[Numbers, Numbers]:
    """Advantages and returns (advantage + value) of m turns of any rollouts, in any order.

    delta_k = r_k + gamma^d V' - V_k, A_k = delta_k + (gamma lam)^d A'; V' and A' are of the next
    turn of the same rollout, d places later (more than one where turns between are not there),
    and 0 behind its last. However its turns fall into rows or branches, a rollout is one line of
    turns in the order that it took them; what a turn is credited with falls by gamma lam a turn,
    whatever its tokens.
    """
    assert value.shape == reward.shape == rollout.shape == number.shape
    advantage = np.zeros(len(value))
    following = -1  # the turn behind, of whatever rollout
    for k in np.lexsort((number, rollout))[::-1].tolist():
        advantage[k] = reward[k] - value[k]
        if following >= 0 and rollout[following] == rollout[k]:
            distance = int(number[following] - number[k])
            advantage[k] += gamma**distance * value[following]
            advantage[k] += (gamma * lam) ** distance * advantage[following]
        following = k
    return advantage, advantage + value


def at_turn_starts(values: PerToken, turn: TokenIndex, turns: int) -> PerToken:
    """For each token the value at its turn's first one, with gradient."""
    return values[first_of_turns(turn, turns)[turn]]


def first_of_turns(turn: TokenIndex, turns: int) -> Int[Tensor, " turns"]:
    """The first token of each turn, by its place."""
    places = torch.arange(len(turn), device=turn.device)
    return places.new_zeros(turns).scatter_reduce(0, turn, places, "amin", include_self=False)
