"""Objectives: advantage x ratio x surrogate x correction x aggregation, and presets of them."""

from .diagnostics import maxima, summarise, sums
from .objective import Evaluated, advantages, evaluate
from .settings import PRESETS, ObjectiveSettings, preset
from .tokens import Tokens

__all__ = [
    "PRESETS",
    "Evaluated",
    "ObjectiveSettings",
    "Tokens",
    "advantages",
    "evaluate",
    "maxima",
    "preset",
    "summarise",
    "sums",
]
