"""What the worker tells people: why prompts are not sampled again, in words. Light to import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

# Of the process, its log and its file in the folder `run`.
NAME = "resampling"

Reason = Literal["no_request", "not_chat", "tools", "media", "held_out"]
MEANINGS: dict[Reason, str] = {
    "no_request": "without a recorded request that this version reads",
    "not_chat": "without messages",
    "tools": "with tools, which need their world",
    "media": "with media, whose tokens are not known",
    "held_out": "held out (promotion.tags)",
}


def describe_unusable(reasons: Mapping[str, int]) -> str:
    """`3 with tools, which need their world; 1 held out (promotion.tags)`"""
    some = [(count, MEANINGS[why]) for why, count in reasons.items() if why in MEANINGS]
    return "; ".join(f"{count} {meaning}" for count, meaning in sorted(some, reverse=True))
