"""What each turn is credited with: the advantages of a batch, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tracegrad_trainer.losses.advantages.base import ADVANTAGES, AdvantageMemory, PerTurn, Rollouts
from tracegrad_trainer.losses.config import ObjectiveSettings


def compute_advantages(
    settings: ObjectiveSettings, rollouts: Rollouts, memory: AdvantageMemory
) -> PerTurn:
    """For each rollout of a batch f64[K], one entry a turn; `memory` is changed in place.

    Raises:
        ValueError: a part of the user's own returned something else, or a number is not finite.
    """
    name = settings.advantage
    found = ADVANTAGES[name](apply_overlong_penalty(rollouts, settings), settings, memory)
    if not isinstance(found, Sequence) or len(found) != len(rollouts):
        raise ValueError(f"advantage {name!r} must return one array a rollout ({len(rollouts)})")
    for rollout, values in zip(rollouts, found, strict=True):
        if np.shape(values) != (len(rollout.tokens),):
            raise ValueError(
                f"advantage {name!r} returned shape {np.shape(values)} for the"
                f" {len(rollout.tokens)} turns of rollout {rollout.rollout_id}"
            )
        if not np.isfinite(values).all():
            raise ValueError(
                f"advantage {name!r} of rollout {rollout.rollout_id} is not finite: {values}"
            )
    return found


def apply_overlong_penalty(rollouts: Rollouts, settings: ObjectiveSettings) -> Rollouts:
    """The rollouts with their rewards less `overlong_penalty`; unchanged without a budget."""
    return [
        replace(
            rollout, reward=rollout.reward - overlong_penalty(int(rollout.tokens.sum()), settings)
        )
        for rollout in rollouts
    ]


def overlong_penalty(tokens: int, settings: ObjectiveSettings) -> float:
    """What a rollout of so many sampled tokens loses (DAPO, arXiv 2503.14476, equation 13).

    Nothing up to `overlong_budget - overlong_buffer`, all of `overlong_penalty` from the budget
    on, and a straight line between.
    """
    budget, buffer = settings.overlong_budget, settings.overlong_buffer
    if budget is None:
        return 0.0
    share = (tokens - (budget - buffer)) / buffer
    return settings.overlong_penalty * min(max(share, 0.0), 1.0)
