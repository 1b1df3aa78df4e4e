"""Surrogates: what is minimised at each token, before correction and aggregation.

A part takes the tokens, the log-ratio [n] and the settings, and returns the loss [n] and at which
tokens its clip or mask acted, bool[n].
"""

from . import behaviour, clipped, experts, preference
from .part import SURROGATES, Surrogate

__all__ = ["SURROGATES", "Surrogate", "behaviour", "clipped", "experts", "preference"]
