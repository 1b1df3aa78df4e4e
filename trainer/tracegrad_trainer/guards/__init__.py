"""Drift guards: what reward hacking looks like, watched in what is about to be trained."""

from tracegrad_trainer.guards.config import GuardSettings
from tracegrad_trainer.guards.drift import Alarm, DriftGuards

__all__ = ["Alarm", "DriftGuards", "GuardSettings"]
