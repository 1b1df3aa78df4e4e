"""Surrogates: what is minimised at each token, before correction and aggregation.

A part takes the tokens, the log-ratio [n] and the settings, and returns the loss [n] and at which
tokens its clip or mask acted, bool[n].
"""

from tracegrad_trainer.losses.surrogates import clipped, demonstrations, off_policy, preferences
from tracegrad_trainer.losses.surrogates.base import SURROGATES, Surrogate

__all__ = ["SURROGATES", "Surrogate", "clipped", "demonstrations", "off_policy", "preferences"]
