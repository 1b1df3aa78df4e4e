"""Times that others state, held against the proxy's own clock."""

from __future__ import annotations

# Facts wait for a proxy that is away, and clocks differ. What is said to be older than this is a
# clock that was never set, or a mistake.
MAX_EVENT_AGE_S = 86_400.0


def clamp_stated_time(stated: float | None, now: float) -> float:
    """`stated`, seconds since the epoch; `now` where that is to come, or more than a day ago."""
    return stated if stated is not None and now - MAX_EVENT_AGE_S <= stated <= now else now
