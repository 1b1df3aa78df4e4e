"""The entropy bonus, and its coefficient where the policy's entropy has a target."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from tracegrad_trainer.losses.config import ObjectiveSettings
    from tracegrad_trainer.losses.tokens import Tokens

# Where a coefficient with a target stays: it comes back from the first in some steps, and beyond
# the second the policy would learn little else.
LOWEST, HIGHEST = 1e-6, 1.0


def entropy_bonus(tokens: Tokens) -> Float[Tensor, " n"]:
    """Entropy of the policy at each sampled token, in nats, with gradient; 0 at an expert's."""
    assert tokens.entropy is not None, "the step brings what `has_entropy` asks for"
    return tokens.entropy.masked_fill(tokens.demonstration, 0.0)


def next_coef(settings: ObjectiveSettings, coef: float, entropy: float) -> float:
    """The coefficient after a step whose sampled tokens had this mean entropy.

    coef x exp(rate x (target - entropy)): gradient descent on its logarithm, as SAC adapts its
    temperature (arXiv 1812.05905). It rises below the target and falls above it. Without a target
    it stays.
    """
    if settings.entropy_target is None:
        return coef
    moved = coef * math.exp(settings.entropy_rate * (settings.entropy_target - entropy))
    return min(max(moved, LOWEST), HIGHEST)
