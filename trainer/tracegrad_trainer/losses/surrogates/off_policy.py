"""Policy gradients with mu in them: they correct the mismatch, so that no correction may again."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tracegrad_trainer.losses.config import ObjectiveSettings
from tracegrad_trainer.losses.ratios import against
from tracegrad_trainer.losses.surrogates.base import SURROGATES, Losses, of_sampled
from tracegrad_trainer.losses.surrogates.clipped import ppo
from tracegrad_trainer.losses.tokens import Tokens, log_ratio


@SURROGATES.register("topr")
@of_sampled
def topr(tokens: Tokens, log_ratios: Float[Tensor, " n"], settings: ObjectiveSettings) -> Losses:
    """-A log pi where A > 0, else -sg[pi/mu]_0^1 A log pi (TOPR, arXiv 2503.14286); pi/mu at the
    chosen ratio's granularity, by default the whole rollout's.

    The paper's rewards are 1 and -1. A graded one that falls below the baseline is a failure, also
    above 0: what is pushed down without a taper has no bound.
    """
    ratio = against(tokens.mu, tokens, settings).detach().exp()
    good = tokens.advantage > 0
    weight = torch.where(good, 1.0, ratio.clamp(max=1))
    return -weight * tokens.advantage * tokens.logp, ~good & (ratio > 1)


@SURROGATES.register("decoupled_ppo")
@of_sampled
def decoupled_ppo(
    tokens: Tokens, log_ratios: Float[Tensor, " n"], settings: ObjectiveSettings
) -> Losses:
    """w ppo(pi/prox), w = prox/mu where that is at most `correction_cap`, else 0: such tokens are
    left out (AReaL, arXiv 2505.24298, as in its code). With `over_cap` "clamp" w is the cap there.

    prox is `old`, or in logs `prox_weight` of the way from mu to pi, without a forward of its own:
    one share for all tokens, where A-3PO (arXiv 2512.06547) takes 1 - 1 / lag in versions.
    """
    if settings.prox == "old":
        prox = tokens.old
    else:
        prox = torch.lerp(tokens.mu, tokens.logp.detach(), settings.prox_weight)
        log_ratios = against(prox, tokens, settings)
    loss, clipped = ppo(tokens, log_ratios, settings)
    w = log_ratio(prox, tokens.mu).exp()
    over = w > settings.correction_cap
    if settings.over_cap == "clamp":
        return w.clamp(max=settings.correction_cap) * loss, clipped
    return (w * loss).masked_fill(over, 0.0), clipped | over


@SURROGATES.register("minirl")
@of_sampled
def minirl(tokens: Tokens, log_ratios: Float[Tensor, " n"], settings: ObjectiveSettings) -> Losses:
    """-M min(sg[pi/mu], cap) A log pi (MiniRL, arXiv 2512.01374; cap is `correction_cap`).

    M is 0 where A > 0 and pi/old > `mask_high`, or A < 0 and pi/old < `mask_low`.
    """
    advantage, ratio = tokens.advantage, log_ratios.detach().exp()
    masked = (advantage > 0) & (ratio > settings.mask_high)
    masked |= (advantage < 0) & (ratio < settings.mask_low)
    weight = log_ratio(tokens.logp.detach(), tokens.mu).exp().clamp(max=settings.correction_cap)
    return -weight.masked_fill(masked, 0.0) * advantage * tokens.logp, masked


@SURROGATES.register("signed_prob_mask")
@of_sampled
def signed_prob_mask(
    tokens: Tokens, log_ratios: Float[Tensor, " n"], settings: ObjectiveSettings
) -> Losses:
    """-(pi/mu) A + `prob_penalty` (log pi/mu)^2; without the first term where A > 0 and
    p_pi - p_mu > `prob_bound`, or A <= 0 and p_pi - p_mu < -`prob_bound` (as in prime-rl).
    """
    log_moved = log_ratio(tokens.logp, tokens.mu)
    more = tokens.logp.detach().exp() - tokens.mu.exp()
    good = tokens.advantage > 0
    masked = torch.where(good, more > settings.prob_bound, more < -settings.prob_bound)
    gain = (log_moved.exp() * tokens.advantage).masked_fill(masked, 0.0)
    return settings.prob_penalty * log_moved.square() - gain, masked
