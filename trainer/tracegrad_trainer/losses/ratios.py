"""Granularity of the ratio pi/old: log-ratios [n], clamped, with gradient.

An expert's tokens were sampled by no policy: they enter no ratio, and their own is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from tracegrad_trainer.losses.config import ObjectiveSettings
from tracegrad_trainer.losses.registry import Registry
from tracegrad_trainer.losses.tokens import (
    LOG_RATIO_LIMIT,
    PerToken,
    Tokens,
    log_ratio,
    rollout_mean,
    rollout_sum,
    segment_mean,
)

Ratio = Callable[[Tokens, ObjectiveSettings], Tensor]

RATIOS: Registry[Ratio] = Registry("ratio")


@RATIOS.register("token")
def token(tokens: Tokens, settings: ObjectiveSettings) -> PerToken:
    """log pi/old of each token."""
    return log_ratio(tokens.policy_logprobs, tokens.old_logprobs).masked_fill(
        tokens.demonstration, 0.0
    )


@RATIOS.register("turn")
def turn(tokens: Tokens, settings: ObjectiveSettings) -> PerToken:
    """Mean over a turn: its tokens share one (geometric-mean) ratio (IPA, arXiv 2512.24873)."""
    each = token(tokens, settings)
    return segment_mean(each, tokens.turn, tokens.turns, tokens.sampled)[tokens.turn]


@RATIOS.register("sequence")
def sequence(tokens: Tokens, settings: ObjectiveSettings) -> PerToken:
    """Mean over the rollout, its gradient left to each token: s_t = sg[s] pi/sg[pi].

    GSPO-token of arXiv 2507.18071: with one advantage a rollout it is GSPO, and advantages may
    differ between turns.
    """
    shared = rollout_mean(token(tokens, settings), tokens)[tokens.rollout]
    return (shared + _straight(tokens)).masked_fill(tokens.demonstration, 0.0)


@RATIOS.register("product")
def product(tokens: Tokens, settings: ObjectiveSettings) -> PerToken:
    """Sum over the rollout: the probability of all that was sampled in it (RLOO, arXiv
    2402.14740).

    Its gradient, through all of the rollout's n tokens, is left to each token as in `sequence`: n
    times its own. With one advantage and weight a rollout the two are the same; else each token
    moves by its own. None beyond the clamp.
    """
    total = rollout_sum(token(tokens, settings), tokens)
    count = rollout_sum(tokens.sampled.to(total.dtype), tokens)
    whole = total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    count = count.masked_fill(whole != total, 0.0)
    straight = count[tokens.rollout] * _straight(tokens)
    return (whole[tokens.rollout] + straight).masked_fill(tokens.demonstration, 0.0)


def _straight(tokens: Tokens) -> PerToken:
    """0, with the gradient of log pi."""
    return tokens.policy_logprobs - tokens.policy_logprobs.detach()


def ratio_to(denominator: PerToken, tokens: Tokens, settings: ObjectiveSettings) -> PerToken:
    """The chosen ratio with something else than `old` below the line."""
    return RATIOS[settings.ratio](replace(tokens, old_logprobs=denominator), settings)
