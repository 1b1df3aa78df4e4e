"""The loss of the value head."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from .tokens import Tokens


def value_loss(tokens: Tokens, clip: float | None) -> Float[Tensor, " n"]:
    """0.5 max((v - R)^2, (clip(v) - R)^2), v within `clip` of what it was before the step.

    Without `clip` 0.5 (v - R)^2 (PPO, arXiv 1707.06347, as in its authors' code). An expert's
    tokens are no sample of what the policy earns: 0.
    """
    value, old, returns = tokens.value, tokens.old_value, tokens.returns
    assert value is not None, "the step brings what `needs` asks for"
    assert old is not None
    assert returns is not None
    error = (value - returns).square()
    if clip is not None:
        near = torch.clamp(value, old - clip, old + clip)
        error = torch.maximum(error, (near - returns).square())
    return (0.5 * error).masked_fill(tokens.expert, 0.0)
