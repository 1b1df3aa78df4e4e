"""Policy gradients over the ratio pi/old."""

from __future__ import annotations

import torch

from tracegrad_trainer.losses.config import ObjectiveSettings
from tracegrad_trainer.losses.surrogates.base import SURROGATES, Losses, sampled_only
from tracegrad_trainer.losses.tokens import PerToken, Tokens


@SURROGATES.register("ppo")
@sampled_only
def ppo(tokens: Tokens, log_ratios: PerToken, settings: ObjectiveSettings) -> Losses:
    """-min(r A, [r]_{1-low}^{1+high} A) (PPO, arXiv 1707.06347).

    `dual_clip` c bounds the loss of bad tokens by -c A (arXiv 1912.09729).
    """
    ratio, advantage = log_ratios.exp(), tokens.advantage
    free = -ratio * advantage
    bounded = -ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantage
    loss = torch.maximum(free, bounded)
    clipped = bounded > free
    if settings.dual_clip is not None:
        ceiling = -settings.dual_clip * advantage
        over = (advantage < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        clipped = clipped | over
    return loss, clipped


@SURROGATES.register("cispo")
@sampled_only
def cispo(tokens: Tokens, log_ratios: PerToken, settings: ObjectiveSettings) -> Losses:
    """-sg[min(r, 1 + high)] A log pi: a bounded weight, and no token without a gradient
    (CISPO, arXiv 2506.13585).
    """
    ratio, cap = log_ratios.detach().exp(), 1 + settings.clip_high
    return -ratio.clamp(max=cap) * tokens.advantage * tokens.policy_logprobs, ratio > cap


@SURROGATES.register("reinforce")
@sampled_only
def reinforce(tokens: Tokens, log_ratios: PerToken, settings: ObjectiveSettings) -> Losses:
    """-A log pi."""
    return -tokens.advantage * tokens.policy_logprobs, torch.zeros_like(tokens.demonstration)


@SURROGATES.register("tis_surrogate")
@sampled_only
def tis_surrogate(tokens: Tokens, log_ratios: PerToken, settings: ObjectiveSettings) -> Losses:
    """-sg[r]_0^1 A log pi: no token weighs more than when it was sampled."""
    ratio = log_ratios.detach().exp()
    return -ratio.clamp(max=1) * tokens.advantage * tokens.policy_logprobs, ratio > 1
