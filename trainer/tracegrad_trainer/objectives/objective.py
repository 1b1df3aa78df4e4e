"""The parts put together: the loss of one micro-batch, as a sum still to be divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .advantages import ADVANTAGES, Memory, Numbers, Scored
from .aggregation import AGGREGATIONS
from .corrections import CORRECTIONS, LEVELS
from .ratios import RATIOS
from .settings import ObjectiveSettings
from .surrogates import SURROGATES
from .tokens import Tokens


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Evaluated:
    """`total / sum of units over the step` is the loss; the rest feeds the diagnostics."""

    total: Tensor  # scalar, with gradient
    units: Tensor  # scalar, this micro-batch's share of the denominator
    log_ratio: Tensor  # [n]
    log_w: Tensor  # [n] at the correction's level
    clipped: Tensor  # bool[n], by the surrogate
    corrected: Tensor  # bool[n], by the correction


def evaluate(settings: ObjectiveSettings, tokens: Tokens) -> Evaluated:
    log_ratio = RATIOS[settings.ratio](tokens)
    loss, clipped = SURROGATES[settings.surrogate](tokens, log_ratio, settings)
    log_w = LEVELS[settings.correction_level](tokens)
    weight, corrected = CORRECTIONS[settings.correction](log_w, settings.correction_cap)
    share, units = AGGREGATIONS[settings.aggregation](tokens)
    return Evaluated(
        total=(loss * weight * share).sum(),
        units=units,
        log_ratio=log_ratio.detach(),
        log_w=log_w,
        clipped=clipped,
        corrected=corrected,
    )


def advantages(
    settings: ObjectiveSettings, rollouts: Sequence[Scored], memory: Memory
) -> list[Numbers]:
    """For each rollout of a batch f64[K], one entry a turn; `memory` is changed in place."""
    return ADVANTAGES[settings.advantage](rollouts, settings, memory)
