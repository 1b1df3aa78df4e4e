"""Objectives: advantage x ratio x surrogate x correction x aggregation, and presets of them.

Settings and advantages can be had without torch.
"""

from typing import TYPE_CHECKING

from tracegrad_trainer.lazily import lazily

from .advantages import Memory, Scored
from .credit import advantages
from .presets import PRESETS
from .settings import ObjectiveSettings, preset

if TYPE_CHECKING:
    from .diagnostics import maxima, summarise, sums
    from .objective import Evaluated, evaluate
    from .tokens import Tokens
else:
    __getattr__ = lazily(
        __name__,
        {
            "diagnostics": ("maxima", "summarise", "sums"),
            "objective": ("Evaluated", "evaluate"),
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
