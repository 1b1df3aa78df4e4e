"""DAPO's soft penalty of over-long rollouts, taken off rewards before there are advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tracegrad_trainer.losses.advantages import RolloutRewards

if TYPE_CHECKING:
    from tracegrad_trainer.losses.config import ObjectiveSettings


def apply_overlong_penalty(
    rollouts: Sequence[RolloutRewards], settings: ObjectiveSettings
) -> list[RolloutRewards]:
    """The rollouts with their rewards less `penalty`; as they are where no budget is set."""
    return [
        replace(
            rollout, reward=rollout.reward - overlong_penalty(int(rollout.tokens.sum()), settings)
        )
        for rollout in rollouts
    ]


def overlong_penalty(tokens: int, settings: ObjectiveSettings) -> float:
    """What a rollout of so many sampled tokens loses (DAPO, arXiv 2503.14476, equation 13).

    Nothing up to `over_length_budget - over_length_part`, all of `over_length_penalty` from the
    budget on, and a straight line between.
    """
    budget, part = settings.overlong_budget, settings.overlong_buffer
    if budget is None:
        return 0.0
    share = (tokens - (budget - part)) / part
    return settings.overlong_penalty * min(max(share, 0.0), 1.0)
