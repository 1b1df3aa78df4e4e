"""The loss of the value head."""

from __future__ import annotations

import torch

from tracegrad_trainer.losses.config import ObjectiveSettings
from tracegrad_trainer.losses.gae import at_turn_starts
from tracegrad_trainer.losses.tokens import PerToken, Tokens


def predicted_values(tokens: Tokens, settings: ObjectiveSettings) -> PerToken:
    """What the value head says of each token, or with `gae_level` turn of its turn: what it says
    at the turn's first token, before anything of it was sampled."""
    assert tokens.value is not None, "the step brings what `needs` asks for"
    if settings.gae_level == "turn":
        return at_turn_starts(tokens.value, tokens.turn, tokens.turns)
    return tokens.value


def value_loss(tokens: Tokens, clip: float | None) -> PerToken:
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
    return (0.5 * error).masked_fill(tokens.demonstration, 0.0)
