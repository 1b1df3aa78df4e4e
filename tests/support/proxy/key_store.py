"""A store of keys in memory."""

from __future__ import annotations

import threading

from tracegrad.store.errors import StoreUnavailable
from tracegrad.store.write.api_keys import KeyOwner

SECRET = "s" * 43


class Cupboard:
    """The store's part in it, and how often it was asked."""

    def __init__(self) -> None:
        self.hashes: dict[bytes, KeyOwner | None] = {}  # None: revoked, which it stays
        self.lookups = 0
        self.broken = False
        self.door = threading.Event()
        self.door.set()
        self.inside = self.most_inside = 0

    def add_key(self, rollout_id: str, key_hash: bytes, scope: str) -> None:
        self._check()
        self.hashes.setdefault(key_hash, KeyOwner(rollout_id, scope))

    def key_owner(self, key_hash: bytes) -> KeyOwner | None:
        self._check()
        self.lookups += 1
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        found = self.hashes.get(key_hash)
        assert self.door.wait(60)
        self.inside -= 1
        return found

    def revoke_keys(self, rollout_id: str) -> None:
        self._check()
        for key, who in self.hashes.items():
            self.hashes[key] = None if who is None or who.rollout_id == rollout_id else who

    def _check(self) -> None:
        if self.broken:
            raise StoreUnavailable("disk is full")
