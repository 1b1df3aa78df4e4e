"""Exact continuation: from turn two on the engine gets the recorded tokens."""

from __future__ import annotations

from tracegrad.proxy.continuation.continuation import Continuation, Place, Plan
from tracegrad.proxy.continuation.text import EngineText
from tracegrad.proxy.continuation.trees import Known, ReadsTurns, known

__all__ = ["Continuation", "EngineText", "Known", "Place", "Plan", "ReadsTurns", "known"]
