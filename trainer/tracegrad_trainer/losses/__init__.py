"""Objectives: advantage x ratio x surrogate x correction x aggregation, and presets of them.

Settings and advantages can be had without torch.
"""

from typing import TYPE_CHECKING

from tracegrad_trainer.losses.advantages import Memory, Scored
from tracegrad_trainer.losses.advantages.compute import advantages
from tracegrad_trainer.losses.config import ObjectiveSettings, preset
from tracegrad_trainer.losses.presets import PRESETS
from tracegrad_trainer.utils.lazy_import import lazily

if TYPE_CHECKING:
    from tracegrad_trainer.losses.diagnostics import maxima, summarise, sums
    from tracegrad_trainer.losses.loss import Evaluated, evaluate
    from tracegrad_trainer.losses.tokens import Tokens
else:
    __getattr__ = lazily(
        __name__,
        {
            "diagnostics": ("maxima", "summarise", "sums"),
            "loss": ("Evaluated", "evaluate"),
            "tokens": ("Tokens",),
        },
    )

__all__ = [
    "PRESETS",
    "Evaluated",
    "Memory",
    "ObjectiveSettings",
    "Scored",
    "Tokens",
    "advantages",
    "evaluate",
    "maxima",
    "preset",
    "summarise",
    "sums",
]
