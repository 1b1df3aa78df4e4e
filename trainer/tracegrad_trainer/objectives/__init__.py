"""Objectives: advantage x ratio x surrogate x correction x aggregation, and presets of them."""

from .advantages import Memory, Scored
from .diagnostics import maxima, summarise, sums
from .objective import Evaluated, advantages, evaluate
from .presets import PRESETS
from .settings import ObjectiveSettings, preset
from .tokens import Tokens

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
