"""The parts put together: the loss of one micro-batch, as a sum still to be divided.

The value loss and the entropy bonus, which have no kinds to choose from, are here too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from tracegrad_trainer.losses.aggregation import AGGREGATIONS
from tracegrad_trainer.losses.check_outputs import (
    check_losses_and_mask,
    check_per_token,
    check_shares_and_units,
)
from tracegrad_trainer.losses.config import ObjectiveSettings
from tracegrad_trainer.losses.corrections import CORRECTIONS, LEVELS, log_weight, share_of_unit
from tracegrad_trainer.losses.gae import at_turn_starts
from tracegrad_trainer.losses.kl import kl_to_reference
from tracegrad_trainer.losses.ratios import RATIOS
from tracegrad_trainer.losses.surrogates import SURROGATES
from tracegrad_trainer.losses.tokens import PerToken, Scalar, TokenMask, Tokens


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossOutput:
    """`total / sum of units over the step` is the loss; the rest feeds the diagnostics.

    `total` = policy + kl_coef x KL + value_coef x value loss - entropy_coef x entropy, each token
    with its share.
    """

    total: Scalar  # with gradient
    units: Scalar  # this micro-batch's part of the denominator
    log_ratio: PerToken
    log_w: PerToken  # at the correction's level
    weight: PerToken  # the correction's
    unit: PerToken  # a sampled token's share of what has one weight: itself, its turn...
    clipped: TokenMask  # the surrogate's clip or mask acted
    corrected: TokenMask  # the correction changed something
    masked: TokenMask  # the correction took the token out
    policy: Scalar  # the terms of `total`
    each_policy: PerToken  # each token's part of `policy`
    kl: Scalar
    value: Scalar
    # What parts summed over rollouts, of the tokens that are here.
    rollout_sums: tuple[Float64[Tensor, " rollouts"], ...]
    entropy: Scalar  # 0 or below: a bonus
    values: PerToken | None  # that the value loss is of


def compute_loss(
    settings: ObjectiveSettings, tokens: Tokens, *, entropy_coef: float | None = None
) -> LossOutput:
    """The loss of a micro-batch's tokens; `entropy_coef` is the settings' own or, where it has a
    target, what became of it.

    Raises:
        ValueError: a part of the user's own returned something of a wrong shape or type.
    """
    n, dtype = len(tokens), tokens.policy_logprobs.dtype
    asked: list[Tensor] = []
    tokens = replace(tokens, asked=asked)
    ratio = check_per_token("ratio", settings.ratio, RATIOS[settings.ratio](tokens, settings), n)
    loss, clipped = check_losses_and_mask(
        "surrogate", settings.surrogate, SURROGATES[settings.surrogate](tokens, ratio, settings), n
    )
    with torch.no_grad():
        log_w, weight, corrected = _correct(settings, tokens)
        name = settings.aggregation
        share, units = check_shares_and_units(
            "aggregation", name, AGGREGATIONS[name](tokens, settings), n
        )
    each_policy = loss * weight * share
    policy = each_policy.sum()
    total = policy
    kl = value = entropy = policy.new_zeros((), dtype=dtype)
    predicted: Tensor | None = None
    if settings.kl != "none":
        each = kl_to_reference(tokens, settings.kl, unbiased=settings.kl_unbiased)
        kl = settings.kl_coef * (each * share).sum()
        # A KL that is only watched keeps its hands off the graph.
        total = total + kl if settings.kl_coef else total
    if "value" in settings.needs:
        predicted = predicted_values(tokens, settings)
        each = value_loss(replace(tokens, value=predicted), settings.value_clip)
        value = settings.value_coef * (each * share).sum()
        total = total + value
    if settings.has_entropy:
        coef = settings.entropy_coef if entropy_coef is None else entropy_coef
        entropy = -coef * (entropy_bonus(tokens) * share).sum()
        total = total + entropy
    assert tokens.rollout_sums is None or len(asked) == len(tokens.rollout_sums)
    return LossOutput(
        total=total,
        units=units,
        log_ratio=ratio.detach(),
        log_w=log_w,
        weight=weight,
        unit=share_of_unit(tokens, settings.correction_level),
        clipped=clipped,
        corrected=corrected,
        masked=weight == 0,
        policy=policy.detach(),
        each_policy=each_policy.detach(),
        kl=kl.detach(),
        value=value.detach(),
        rollout_sums=tuple(asked),
        entropy=entropy.detach(),
        values=None if predicted is None else predicted.detach(),
    )


def _correct(settings: ObjectiveSettings, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """log w at the level, and the correction's weights and what it changed: of sampled tokens."""
    name, n = settings.correction_level, len(tokens)
    level = LEVELS[name]

    def shared(values: Tensor) -> Tensor:
        return check_per_token("correction_level", name, level(values, tokens, settings), n)

    weight, changed = check_losses_and_mask(
        "correction",
        settings.correction,
        CORRECTIONS[settings.correction](tokens, shared, settings),
        n,
    )
    log_w = log_weight(tokens, shared).masked_fill(tokens.demonstration, 0.0)
    return log_w, weight.masked_fill(tokens.demonstration, 1.0), changed & tokens.sampled


def predicted_values(tokens: Tokens, settings: ObjectiveSettings) -> PerToken:
    """The value of each token, or with `gae_level` turn of its turn: that of the turn's first
    token, before anything of it was sampled."""
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


def entropy_bonus(tokens: Tokens) -> PerToken:
    """Entropy of the policy at each sampled token, in nats, with gradient; 0 at an expert's."""
    assert tokens.entropy is not None, "the step brings what `has_entropy` asks for"
    return tokens.entropy.masked_fill(tokens.demonstration, 0.0)
