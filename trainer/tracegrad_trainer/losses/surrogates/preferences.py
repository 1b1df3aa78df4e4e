"""Losses of whole rollouts, against a reference policy. Each is spread evenly over its targets, so
that the sum over tokens is the sum over pairs or rollouts.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from tracegrad_trainer.losses.config import ObjectiveSettings
from tracegrad_trainer.losses.surrogates.base import SURROGATES, Losses
from tracegrad_trainer.losses.tokens import (
    PerToken,
    TokenIndex,
    Tokens,
    pairs_of_tokens,
    rollout_sum,
    segment_sum,
)


@SURROGATES.register("dpo")
def dpo(tokens: Tokens, log_ratios: PerToken, settings: ObjectiveSettings) -> Losses:
    """-log sigmoid(beta [(log pi - ref)_chosen - (log pi - ref)_rejected]) of each pair
    (DPO, arXiv 2305.18290). A side may have several rows; a pair without both sides has no loss.
    """
    pairs = pairs_of_tokens(tokens)
    margin = segment_sum(pairs.side * _gain(tokens), pairs.of_token, tokens.rows)
    loss = -logsigmoid(settings.beta * margin).masked_fill(~pairs.whole, 0.0)
    return _spread(loss, pairs.of_token, tokens), torch.zeros_like(tokens.demonstration)


@SURROGATES.register("kto")
def kto(tokens: Tokens, log_ratios: PerToken, settings: ObjectiveSettings) -> Losses:
    """Chosen rollouts 1 - sigmoid(beta (l - z)), rejected ones 1 - sigmoid(beta (z - l))
    (KTO, arXiv 2402.01306); l = log pi - ref of the rollout, z = `kto_z`. Without a label: 0.
    """
    assert tokens.kto_z is not None, "the step brings what `needs` asks for"
    gain = rollout_sum(_gain(tokens), tokens)[tokens.rollout]
    pull = settings.beta * tokens.label[tokens.row].to(gain.dtype)
    # 1 - sigmoid(x) = sigmoid(-x), which keeps its digits where sigmoid is near 1.
    loss = torch.sigmoid(-pull * (gain - tokens.kto_z.detach()))
    # The sum has no gradient: each token is given the loss's by the sum.
    slope = -pull * loss * (1 - loss)
    loss = loss / tokens.rollout_tokens + slope * (
        tokens.policy_logprobs - tokens.policy_logprobs.detach()
    )
    return loss.masked_fill(pull == 0, 0.0), torch.zeros_like(tokens.demonstration)


def _gain(tokens: Tokens) -> PerToken:
    assert tokens.reference_logprobs is not None, "the step brings what `needs` asks for"
    return tokens.policy_logprobs - tokens.reference_logprobs


def _spread(loss: Float[Tensor, " rows"], segment: TokenIndex, tokens: Tokens) -> PerToken:
    sizes = segment_sum(torch.ones_like(tokens.rollout_logprobs), segment, len(loss))
    return (loss / sizes.clamp(min=1))[segment]
