"""When a process that ended is started again."""

from __future__ import annotations

# At once after it served so long, else doubling.
STABLE_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0
_MOST_DOUBLINGS = 20  # beyond that the pause is the longest


def pause_before_start(failures: int) -> float:
    """Seconds, after so many ends in a row without STABLE_S of service between them."""
    if failures < 2:
        return 0.0
    return min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), LONGEST_PAUSE_S)
