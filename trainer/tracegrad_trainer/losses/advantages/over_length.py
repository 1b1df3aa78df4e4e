"""DAPO's soft penalty of over-long rollouts, taken off rewards before there are advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tracegrad_trainer.losses.advantages import Scored

if TYPE_CHECKING:
    from tracegrad_trainer.losses.config import ObjectiveSettings


def over_length(rollouts: Sequence[Scored], settings: ObjectiveSettings) -> list[Scored]:
    """The rollouts with their rewards less `penalty`; as they are where no budget is set."""
    return [
        replace(rollout, reward=rollout.reward - penalty(int(rollout.tokens.sum()), settings))
        for rollout in rollouts
    ]


def penalty(tokens: int, settings: ObjectiveSettings) -> float:
    """What a rollout of so many sampled tokens loses (DAPO, arXiv 2503.14476, equation 13).

    Nothing up to `over_length_budget - over_length_part`, all of `over_length_penalty` from the
    budget on, and a straight line between.
    """
    budget, part = settings.over_length_budget, settings.over_length_part
    if budget is None:
        return 0.0
    share = (tokens - (budget - part)) / part
    return settings.over_length_penalty * min(max(share, 0.0), 1.0)
