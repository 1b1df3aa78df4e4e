"""Surrogates that know what to do with an expert's tokens."""

from __future__ import annotations

import torch

from tracegrad_trainer.losses.config import ObjectiveSettings
from tracegrad_trainer.losses.surrogates.base import SURROGATES, Losses
from tracegrad_trainer.losses.tokens import PerToken, Tokens


@SURROGATES.register("ipa")
def ipa(tokens: Tokens, log_ratios: PerToken, settings: ObjectiveSettings) -> Losses:
    """G > 0: -G log pi, without a ratio; else -sg[rho]_0^1 G log pi (IPA, arXiv 2512.24873).

    Sampled tokens times `reinforcement`; an expert's -G log pi times `imitation`, G the return
    that the turn had for the expert (advantage `ipa`), without the paper's further weight
    pi(turn), next to nothing until the turn is likely anyway. An expert is imitated or left
    alone: where it failed (a return below 0) the policy is not pushed away from it.
    """
    ratio, returns = log_ratios.detach().exp(), tokens.advantage
    good = returns > 0
    weight = settings.reinforcement * torch.where(good, 1.0, ratio.clamp(max=1))
    weight = torch.where(tokens.demonstration, settings.imitation * good, weight)
    return -weight * returns * tokens.policy_logprobs, ~good & (ratio > 1) & tokens.sampled


@SURROGATES.register("sft")
def sft(tokens: Tokens, log_ratios: PerToken, settings: ObjectiveSettings) -> Losses:
    """-log pi, sampled or an expert's."""
    return -tokens.policy_logprobs, torch.zeros_like(tokens.demonstration)
