"""What this process has leased stays its own for as long as it lives, however long a step takes.

A thread renews it, with a connection of its own to the store, so that a main thread that waits in
a collective, for a judge or for a slow step loses nothing. A process that is dead renews nothing:
its leases end after their time, and others have its groups. What is lost all the same (the process
was suspended, the store could not be reached, somebody gave it back) is found where the holder
asks, and by the ledger, which refuses it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Set

from tracegrad.store import Group, Ledger, LostLease, StoreError, lease_by_rollout

logger = logging.getLogger(__name__)

# So many renewals may fail before a lease ends.
RENEWALS_PER_TTL = 4


class HeldLeases:
    """Leased and neither consumed nor given back. `every_s`: seconds between two renewals."""

    def __init__(self, ledger: Ledger, ttl_s: float, *, every_s: float | None = None) -> None:
        self._ledger = ledger
        self._ttl_s = ttl_s
        self._every_s = ttl_s / RENEWALS_PER_TTL if every_s is None else every_s
        self._leases: dict[str, str] = {}  # rollout -> lease
        self._lock = threading.Lock()  # of `_leases`; not held while the store is asked
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def rollouts(self) -> Set[str]:
        with self._lock:
            return set(self._leases)

    def hold(self, groups: Iterable[Group]) -> None:
        with self._lock:
            self._leases |= lease_by_rollout(groups)
        if self._thread is None and self._leases:
            self._thread = threading.Thread(target=self._renew, name="leases", daemon=True)
            self._thread.start()

    def drop(self, groups: Iterable[Group]) -> None:
        """They are consumed, given back or lost."""
        with self._lock:
            for rollout_id in lease_by_rollout(groups):
                self._leases.pop(rollout_id, None)

    def lost_rollouts(self, groups: Iterable[Group]) -> list[LostLease]:
        """Which of them are another's by now; the others are renewed. Raises StoreError."""
        return self._ledger.renew(lease_by_rollout(groups), ttl_s=self._ttl_s)

    def close(self) -> None:
        """Nothing is renewed any more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _renew(self) -> None:
        failed = False
        while not self._closed.wait(self._every_s):
            with self._lock:
                leases = dict(self._leases)
            try:
                # What is lost shows where it is used: it may have been consumed just now.
                self._ledger.renew(leases, ttl_s=self._ttl_s)
                failed = False
            except StoreError as error:
                if not failed:
                    logger.warning("leases cannot be renewed; trying again: %s", error)
                failed = True
