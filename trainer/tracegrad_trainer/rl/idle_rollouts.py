"""Rollouts that nobody opened, so that nobody ends them, are closed when idle (`data.idle_s`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from tracegrad.store import Ledger
from tracegrad.store.ledger.idle import MOST_CLOSED
from tracegrad.text_format import format_count

logger = logging.getLogger(__name__)

_ASK_EVERY_S = 1.0


class IdleRollouts:
    """Closes those with these `tags` that had no call for `idle_s` seconds. Several trainers of a
    store may do so at once: each rollout is closed by one of them."""

    def __init__(self, ledger: Ledger, idle_s: float, tags: Mapping[str, str]) -> None:
        self._ledger = ledger
        self._idle_s = idle_s
        self._tags = tags
        self._asked = -_ASK_EVERY_S

    def close_some(self) -> None:
        """As many as are closed at once; asks the store once a second at most. Raises
        StoreError."""
        if time.monotonic() - self._asked >= _ASK_EVERY_S:
            self._asked = time.monotonic()
            self._close()

    def close_all(self) -> None:
        """Raises StoreError."""
        while self._close() == MOST_CLOSED:
            pass

    def _close(self) -> int:
        closed = self._ledger.close_idle(self._idle_s, tags=self._tags)
        if closed:
            logger.info(
                "%s closed after %g s without a call (data.idle_s)",
                format_count(len(closed), "rollout"),
                self._idle_s,
            )
        return len(closed)
