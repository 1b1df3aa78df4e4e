"""Granularity of the ratio pi/old: log-ratios [n], clamped, with gradient.

An expert's tokens were sampled by no policy: they enter no ratio, and their own is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from .registry import Registry
from .settings import ObjectiveSettings
from .tokens import LOG_RATIO_LIMIT, Tokens, log_ratio, segment_mean, segment_sum

Ratio = Callable[[Tokens, ObjectiveSettings], Tensor]

RATIOS: Registry[Ratio] = Registry("ratio")


@RATIOS.register("token")
def token(tokens: Tokens, settings: ObjectiveSettings) -> Float[Tensor, " n"]:
    """log pi/old of each token."""
    return log_ratio(tokens.logp, tokens.old).masked_fill(tokens.expert, 0.0)


@RATIOS.register("turn")
def turn(tokens: Tokens, settings: ObjectiveSettings) -> Float[Tensor, " n"]:
    """Mean over a turn: its tokens share one (geometric-mean) ratio (IPA, arXiv 2512.24873)."""
    each = token(tokens, settings)
    return segment_mean(each, tokens.turn, tokens.turns, tokens.sampled)[tokens.turn]


@RATIOS.register("sequence")
def sequence(tokens: Tokens, settings: ObjectiveSettings) -> Float[Tensor, " n"]:
    """Mean over a row, its gradient left to each token: s_t = sg[s] pi/sg[pi].

    GSPO-token of arXiv 2507.18071: with one advantage a row it is GSPO, and advantages may differ
    between turns.
    """
    each = token(tokens, settings).detach()
    shared = segment_mean(each, tokens.row, tokens.rows, tokens.sampled)[tokens.row]
    straight = (tokens.logp - tokens.logp.detach()).masked_fill(tokens.expert, 0.0)
    return shared.masked_fill(tokens.expert, 0.0) + straight


@RATIOS.register("product")
def product(tokens: Tokens, settings: ObjectiveSettings) -> Float[Tensor, " n"]:
    """Sum over a row: the probability of all that was sampled in it (RLOO, arXiv 2402.14740)."""
    total = segment_sum(token(tokens, settings), tokens.row, tokens.rows)
    whole = total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[tokens.row]
    return whole.masked_fill(tokens.expert, 0.0)


def against(
    denominator: Float[Tensor, " n"], tokens: Tokens, settings: ObjectiveSettings
) -> Float[Tensor, " n"]:
    """The chosen ratio with something else than `old` below the line."""
    return RATIOS[settings.ratio](replace(tokens, old=denominator), settings)
