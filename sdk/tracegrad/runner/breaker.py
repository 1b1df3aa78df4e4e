"""Pauses starts while most of them fail: a machine that cannot start sandboxes is not asked for
more of them at once. Pure: the time is given."""

from __future__ import annotations

from collections import deque

WATCHED = 10  # the last starts
FEWEST = 5  # of which more than half fail
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0


class Breaker:
    """Opens when more than half of the last `FEWEST` to `WATCHED` starts failed. After its pause
    one start is tried; it closes when that succeeds, and else pauses for twice as long.

    Attributes:
        opened: how often it did.
    """

    def __init__(self) -> None:
        self._last: deque[bool] = deque(maxlen=WATCHED)
        self._until: float | None = None  # None: closed
        self._pause_s = FIRST_PAUSE_S
        self._trying = False
        self.opened = 0

    def may_start(self, now: float) -> bool:
        return self._until is None or (now >= self._until and not self._trying)

    def opens_at(self, now: float) -> float | None:
        """When a start may be tried again; None: now, or after the one that is tried."""
        return None if self._until is None or self._until <= now else self._until

    def starting(self) -> None:
        """A start that was allowed begins."""
        self._trying = self._until is not None

    def started(self, came: bool, now: float) -> None:
        """How a start ended; those that were under way when it opened count, too."""
        if self._until is not None:
            if came:
                self._close()
            elif self._trying:
                self._trying = False
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
                self._until = now + self._pause_s
            return
        self._last.append(came)
        failed = self._last.count(False)
        if len(self._last) >= FEWEST and 2 * failed > len(self._last):
            self._until = now + self._pause_s
            self.opened += 1

    def abandoned(self) -> None:
        """The start was given up before it was known how it ends."""
        self._trying = False

    def _close(self) -> None:
        self._last.clear()
        self._until, self._pause_s, self._trying = None, FIRST_PAUSE_S, False
