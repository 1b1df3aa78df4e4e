"""Policy gradients with mu in them: they correct the mismatch, so that no correction may again."""

from __future__ import annotations

import torch

from tracegrad_trainer.losses.config import ObjectiveSettings
from tracegrad_trainer.losses.ratios import ratio_to
from tracegrad_trainer.losses.surrogates.base import SURROGATES, Losses, sampled_only
from tracegrad_trainer.losses.surrogates.clipped import ppo
from tracegrad_trainer.losses.tokens import PerToken, Tokens, log_ratio


@SURROGATES.register("topr")
@sampled_only
def topr(tokens: Tokens, log_ratios: PerToken, settings: ObjectiveSettings) -> Losses:
    """-A log pi where A > 0, else -sg[pi/mu]_0^1 A log pi (TOPR, arXiv 2503.14286); pi/mu at the
    chosen ratio's granularity, by default the whole rollout's.

    The paper's rewards are 1 and -1. A graded one that falls below the baseline is a failure, also
    above 0: what is pushed down without a taper has no bound.
    """
    ratio = ratio_to(tokens.rollout_logprobs, tokens, settings).detach().exp()
    good = tokens.advantage > 0
    weight = torch.where(good, 1.0, ratio.clamp(max=1))
    return -weight * tokens.advantage * tokens.policy_logprobs, ~good & (ratio > 1)


@SURROGATES.register("decoupled_ppo")
@sampled_only
def decoupled_ppo(tokens: Tokens, log_ratios: PerToken, settings: ObjectiveSettings) -> Losses:
    """w ppo(pi/prox), w = prox/mu where that is at most `correction_cap`, else 0: such tokens are
    left out (AReaL, arXiv 2505.24298, as in its code). With `over_cap` "clamp" w is the cap there.

    prox is `old`, or in logs `prox_weight` of the way from mu to pi, without a forward of its own:
    one share for all tokens, where A-3PO (arXiv 2512.06547) takes 1 - 1 / lag in versions.
    """
    if settings.prox == "old":
        prox = tokens.old_logprobs
    else:
        prox = torch.lerp(
            tokens.rollout_logprobs, tokens.policy_logprobs.detach(), settings.prox_weight
        )
        log_ratios = ratio_to(prox, tokens, settings)
    loss, clipped = ppo(tokens, log_ratios, settings)
    w = log_ratio(prox, tokens.rollout_logprobs).exp()
    over = w > settings.correction_cap
    if settings.over_cap == "clamp":
        return w.clamp(max=settings.correction_cap) * loss, clipped
    return (w * loss).masked_fill(over, 0.0), clipped | over


@SURROGATES.register("minirl")
@sampled_only
def minirl(tokens: Tokens, log_ratios: PerToken, settings: ObjectiveSettings) -> Losses:
    """-M min(sg[pi/mu], cap) A log pi (MiniRL, arXiv 2512.01374; cap is `correction_cap`).

    M is 0 where A > 0 and pi/old > `mask_high`, or A < 0 and pi/old < `mask_low`.
    """
    advantage, ratio = tokens.advantage, log_ratios.detach().exp()
    masked = (advantage > 0) & (ratio > settings.mask_high)
    masked |= (advantage < 0) & (ratio < settings.mask_low)
    weight = (
        log_ratio(tokens.policy_logprobs.detach(), tokens.rollout_logprobs)
        .exp()
        .clamp(max=settings.correction_cap)
    )
    return -weight.masked_fill(masked, 0.0) * advantage * tokens.policy_logprobs, masked


@SURROGATES.register("signed_prob_mask")
@sampled_only
def signed_prob_mask(tokens: Tokens, log_ratios: PerToken, settings: ObjectiveSettings) -> Losses:
    """-(pi/mu) A + `prob_penalty` (log pi/mu)^2; without the first term where A > 0 and
    p_pi - p_mu > `prob_bound`, or A <= 0 and p_pi - p_mu < -`prob_bound` (as in prime-rl).
    """
    log_moved = log_ratio(tokens.policy_logprobs, tokens.rollout_logprobs)
    more = tokens.policy_logprobs.detach().exp() - tokens.rollout_logprobs.exp()
    good = tokens.advantage > 0
    masked = torch.where(good, more > settings.prob_bound, more < -settings.prob_bound)
    gain = (log_moved.exp() * tokens.advantage).masked_fill(masked, 0.0)
    return settings.prob_penalty * log_moved.square() - gain, masked
