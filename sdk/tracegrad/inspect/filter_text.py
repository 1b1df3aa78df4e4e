"""Filters as people write them, on the command line and in the form of the web page."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from datetime import datetime

_AGO = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
WHEN = "a date (2026-11-20), a time (2026-11-20T14:00), seconds since 1970, or how long ago (7d)"


def read_tags(pairs: Iterable[str]) -> dict[str, str]:
    """Of `key=value` each. ValueError: one is not."""
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ValueError(f"{pair!r}; write key=value")
        found[key] = value
    return found


def read_time(text: str) -> float:
    """Seconds since the epoch. Dates and times without a zone are local ones. ValueError: it is
    no time."""
    if ago := re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text):
        return time.time() - float(ago[1]) * _AGO[ago[2]]
    if re.fullmatch(r"\d{9,}(\.\d+)?", text):
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r}; write {WHEN}") from None
