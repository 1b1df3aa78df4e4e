"""When to stop starting: most starts fail, and each attempt made now would be lost to it.

A state machine without a clock: whoever asks says what time it is.
"""

from __future__ import annotations

from collections import deque

WINDOW = 10  # the last starts that are looked at
FEWEST = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0


class StartBreaker:
    """Pauses when more than half of the last starts, five or more, failed. After the pause a single
    start is tried: it ends the matter, or the next pause is twice as long."""

    def __init__(self) -> None:
        self._last: deque[bool] = deque(maxlen=WINDOW)
        self._pause_s = FIRST_PAUSE_S
        self._until: float | None = None
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Whether it pauses."""
        return self._until is not None

    def delay(self, now: float) -> float:
        """Seconds until it is worth asking again; 0: start, and tell `took` how it went."""
        if self._until is None:
            return 0.0
        if self._trying:
            return self._pause_s
        if (left := self._until - now) > 0:
            return left
        self._trying = True
        return 0.0

    def took(self, ok: bool, now: float) -> None:
        """How a start ended."""
        self._last.append(ok)
        if self._until is not None:
            if not self._trying:
                return  # begun before the pause
            self._trying = False
            if ok:
                self._last.clear()
                self._until, self._pause_s = None, FIRST_PAUSE_S
            else:
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
                self._until = now + self._pause_s
        elif len(self._last) >= FEWEST and 2 * self._last.count(False) > len(self._last):
            self._until = now + self._pause_s

    def gave_up(self) -> None:
        """A start that `delay` allowed ended without a verdict: it was cancelled."""
        self._trying = False
