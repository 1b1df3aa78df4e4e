"""Exact continuation: from turn two on the engine gets the recorded tokens."""

from __future__ import annotations

from tracegrad.proxy.prompt_reuse.renderer_loader import EngineText
from tracegrad.proxy.prompt_reuse.resolver import Continuation, Place, Plan
from tracegrad.proxy.prompt_reuse.tree_cache import Known, ReadsTurns, known

__all__ = ["Continuation", "EngineText", "Known", "Place", "Plan", "ReadsTurns", "known"]
