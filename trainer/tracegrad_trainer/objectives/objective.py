"""The parts put together: the loss of one micro-batch, as a sum still to be divided."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .aggregation import AGGREGATIONS
from .corrections import CORRECTIONS, LEVELS
from .kl import kl_to_reference
from .ratios import RATIOS
from .returned import returned, with_truths, with_units
from .settings import ObjectiveSettings
from .surrogates import SURROGATES
from .tokens import Tokens, mismatch
from .value import value_loss


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Evaluated:
    """`total / sum of units over the step` is the loss; the rest feeds the diagnostics.

    `total` = policy + kl_coef x KL + value_coef x value loss, each token with its share.
    """

    total: Float[Tensor, ""]  # with gradient
    units: Float[Tensor, ""]  # this micro-batch's part of the denominator
    log_ratio: Float[Tensor, " n"]
    log_w: Float[Tensor, " n"]  # at the correction's level
    clipped: Bool[Tensor, " n"]  # the surrogate's clip or mask acted
    corrected: Bool[Tensor, " n"]  # the correction changed something
    masked: Bool[Tensor, " n"]  # the correction took the token out
    policy: Float[Tensor, ""]  # the terms of `total`
    each_policy: Float[Tensor, " n"]  # each token's part of `policy`
    kl: Float[Tensor, ""]
    value: Float[Tensor, ""]


def evaluate(settings: ObjectiveSettings, tokens: Tokens) -> Evaluated:
    """The loss of a micro-batch's tokens.

    Raises:
        ValueError: a part of the user's own returned something of a wrong shape or type.
    """
    n, dtype = len(tokens), tokens.logp.dtype
    ratio = returned("ratio", settings.ratio, RATIOS[settings.ratio](tokens, settings), n)
    loss, clipped = with_truths(
        "surrogate", settings.surrogate, SURROGATES[settings.surrogate](tokens, ratio, settings), n
    )
    with torch.no_grad():
        log_w, weight, corrected = _correct(settings, tokens)
        name = settings.aggregation
        share, units = with_units("aggregation", name, AGGREGATIONS[name](tokens, settings), n)
    each_policy = loss * weight * share
    policy = each_policy.sum()
    total = policy
    kl = value = policy.new_zeros((), dtype=dtype)
    if settings.kl != "none":
        each = kl_to_reference(tokens, settings.kl, unbiased=settings.kl_unbiased)
        kl = settings.kl_coef * (each * share).sum()
        # A KL that is only watched keeps its hands off the graph.
        total = total + kl if settings.kl_coef else total
    if "value" in settings.needs:
        value = settings.value_coef * (value_loss(tokens, settings.value_clip) * share).sum()
        total = total + value
    return Evaluated(
        total=total,
        units=units,
        log_ratio=ratio.detach(),
        log_w=log_w,
        clipped=clipped,
        corrected=corrected,
        masked=weight == 0,
        policy=policy.detach(),
        each_policy=each_policy.detach(),
        kl=kl.detach(),
        value=value.detach(),
    )


def _correct(settings: ObjectiveSettings, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """log w at the level, and the correction's weights and what it changed: of sampled tokens."""
    name, n = settings.correction_level, len(tokens)
    level = LEVELS[name]

    def shared(values: Tensor) -> Tensor:
        return returned("correction_level", name, level(values, tokens, settings), n)

    weight, changed = with_truths(
        "correction",
        settings.correction,
        CORRECTIONS[settings.correction](tokens, shared, settings),
        n,
    )
    log_w = shared(mismatch(tokens)).masked_fill(tokens.expert, 0.0)
    return log_w, weight.masked_fill(tokens.expert, 1.0), changed & tokens.sampled
