"""Exact continuation: from turn two on the engine gets the recorded tokens."""

from __future__ import annotations

from tracegrad.proxy.prompt_reuse.renderer_loader import EngineRenderer
from tracegrad.proxy.prompt_reuse.resolver import ContinuationPlan, PromptReuse, TreePosition
from tracegrad.proxy.prompt_reuse.tree_cache import CachedTurn, TurnReader, cached_turn

__all__ = [
    "CachedTurn",
    "ContinuationPlan",
    "EngineRenderer",
    "PromptReuse",
    "TreePosition",
    "TurnReader",
    "cached_turn",
]
