"""The penalty for leaving a reference policy, per token, with gradient.

Estimators of KL(pi || reference) from a sampled token (Schulman, "Approximating KL divergence"),
d = log pi - log reference.
"""

from __future__ import annotations

from typing import Literal

import torch

from tracegrad_trainer.losses.tokens import PerToken, Tokens, log_ratio

Estimator = Literal["k1", "k2", "k3"]


def kl_to_reference(tokens: Tokens, estimator: Estimator, *, unbiased: bool) -> PerToken:
    """k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d; 0 for an expert's tokens.

    As a loss on the policy's own tokens only k2 has the gradient of the KL: that of k1 is 0 on
    average, that of k3 an approximation. `unbiased` multiplies by pi/mu, so that all three have
    it, also on tokens that an older policy sampled: k1 and k3 with the ratio's gradient
    (DeepSeek-V3.2, arXiv 2512.02556, whose ratio is to its sampler), k2 without, whose own
    gradient is whole. It is so a token, given what came before it; log pi/mu is clamped to
    -20..20, and nothing else bounds its variance.
    """
    assert tokens.reference_logprobs is not None, "the step brings what `needs` asks for"
    d = log_ratio(tokens.policy_logprobs, tokens.reference_logprobs)
    match estimator:
        case "k1":
            found = d
        case "k2":
            found = d.square() / 2
        case "k3":
            found = torch.expm1(-d) + d
    if unbiased:
        ratio = (
            log_ratio(tokens.policy_logprobs, tokens.rollout_logprobs)
            .masked_fill(tokens.demonstration, 0.0)
            .exp()
        )
        found = found * (ratio.detach() if estimator == "k2" else ratio)
    return found.masked_fill(tokens.demonstration, 0.0)
