"""Objectives: advantage x ratio x surrogate x correction x aggregation, and presets of them.

Settings and advantages can be had without torch.
"""

from typing import TYPE_CHECKING

from tracegrad_trainer.losses.advantages import AdvantageMemory, RolloutRewards
from tracegrad_trainer.losses.advantages.compute import compute_advantages
from tracegrad_trainer.losses.config import ObjectiveSettings, preset
from tracegrad_trainer.losses.presets import PRESETS
from tracegrad_trainer.utils.lazy_import import lazy_getattr

if TYPE_CHECKING:
    from tracegrad_trainer.losses.loss import compute_loss
    from tracegrad_trainer.losses.tokens import Tokens
else:
    __getattr__ = lazy_getattr(__name__, {"loss": ("compute_loss",), "tokens": ("Tokens",)})

__all__ = [
    "PRESETS",
    "AdvantageMemory",
    "ObjectiveSettings",
    "RolloutRewards",
    "Tokens",
    "compute_advantages",
    "compute_loss",
    "preset",
]
