"""What a step's metrics say together, for those who tell of it."""

from __future__ import annotations

from collections.abc import Mapping


def trained_turns(metrics: Mapping[str, float]) -> int:
    """Turns that the step trained, each once; `turns_trained` counts them in every pass."""
    trained = metrics.get("turns", metrics.get("turns_trained", 0.0))
    return int(trained - metrics.get("turns_skipped", 0.0))


def has_gap(metrics: Mapping[str, float]) -> bool:
    """Whether the step had tokens of the current version; without any, a gap of 0 says nothing."""
    return "gap_max" in metrics and metrics.get("gap_tokens", 1.0) > 0
