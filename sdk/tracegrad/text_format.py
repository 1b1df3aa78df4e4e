"""Times and counts as people read them: what store, command line and trainer print is alike."""

from __future__ import annotations

import time

# Seconds of each unit, the longest first.
_AGE_UNITS = (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0))


def format_age(moment: float, *, compact: bool = False) -> str:
    """How long ago `moment` was, by this machine's clock.

    Args:
        moment: seconds since the epoch; one in the future is `0 s`.
        compact: for columns, and as `--since` reads them: `42s`, `3m`, `5h`, `2d`.
    """
    elapsed = format_elapsed(time.time() - moment)
    return elapsed.replace("min", "m").replace(" ", "") if compact else elapsed


def format_elapsed(seconds: float) -> str:
    """In its longest unit, without decimals: `42 s`, `3 min`, `5 h`, `2 d`."""
    for unit, size in _AGE_UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def format_duration(seconds: float) -> str:
    """How long something took: `35 ms`, `1.2 s`, `2.5 min`, and from two of a unit on in it."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    for unit, size in _AGE_UNITS[:2]:
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds / 60:.1f} min"


def format_time(moment: float) -> str:
    """Local date and time of seconds since the epoch."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def format_count(count: int, word: str) -> str:
    """`1 turn`, `1,200 turns`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
