"""Presets: objectives by name, as parts and their numbers."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {
        "advantage": "grpo",
        "ratio": "token",
        "surrogate": "ppo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "correction": "tis",
        "correction_level": "turn",
        "correction_cap": 2.0,
        "aggregation": "token_mean",
    },
}
