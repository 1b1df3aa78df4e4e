"""What operators do to a store, in few words."""

from __future__ import annotations

from typing import Any

from tracegrad.events import Json
from tracegrad.store import RolloutFilter, Store
from tracegrad.store.maintenance import (
    RetentionRule,
    RolloutSelection,
    TextRemovalRule,
    drop_text,
    prune,
)


def selection(*rollouts: str, before: float | None = None, **wanted: Any) -> RolloutSelection:
    return RolloutSelection(wanted=RolloutFilter(**wanted), rollouts=rollouts, before=before)


def drop(store: Store, *rollouts: str, before: float = float("inf"), **wanted: Any) -> Json:
    """What went of the texts that were stored before that time."""
    rule = TextRemovalRule(selection=selection(*rollouts, **wanted), before=before)
    return drop_text(store, rule)


def remove(store: Store, *rollouts: str, also_untrained: bool = True) -> Json:
    rule = RetentionRule(selection=selection(*rollouts), also_untrained=also_untrained)
    return prune(store, rule)
