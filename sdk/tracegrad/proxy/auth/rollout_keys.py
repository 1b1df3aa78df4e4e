"""Keys that were made for one rollout: `tg-<rollout>.<secret>`.

A key has scopes. One for `calls` is for the agent: it calls models. One for `events` is for whoever
scores the agent: it posts rewards and the rollout's end.

The store keeps only a key's SHA-256. That is enough for 256 random bits, which nobody can guess
from it: slow hashes are for passwords. Whoever loses a key has a new one made.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol, TypeVar

from cachetools import TTLCache

from tracegrad.key_derivation import CALLS, KeyScope
from tracegrad.protocol import API_KEY_PREFIX, SECRET_KEY
from tracegrad.proxy.http.errors import Unavailable
from tracegrad.proxy.shared_log import SharedLog
from tracegrad.proxy.store_async import run_in_thread
from tracegrad.store.errors import StoreUnavailable
from tracegrad.store.write.api_keys import KeyOwner

SECRET_BYTES = 32
# A revocation by another proxy is seen after so many seconds, by another worker at once.
REMEMBERED_S = 60.0
REFUSED_S = 5.0
REMEMBERED, REFUSED = 10_000, 1_000
# Lookups at a time: strangers with made-up keys must not keep the threads from everybody else.
LOOKUPS = 4

# A rollout's id may hold dots; a secret holds none, and 32 bytes make 43 characters.


T = TypeVar("T")


class KeyStore(Protocol):
    """`tracegrad.store.Store`. Each of them may raise StoreUnavailable."""

    def add_key(self, rollout_id: str, key_hash: bytes, scope: str) -> object: ...

    def key_owner(self, key_hash: bytes) -> KeyOwner | None: ...

    def revoke_keys(self, rollout_id: str) -> object: ...


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def rollout_in_key(key: str) -> str | None:
    """The rollout in `tg-<rollout>` or `tg-<rollout>.<secret>`, unproven; None for other keys."""
    if not key.startswith(API_KEY_PREFIX):
        return None
    minted = SECRET_KEY.fullmatch(key)
    return minted[1] if minted else key.removeprefix(API_KEY_PREFIX)


class KeyGrant(NamedTuple):
    """What a key opens."""

    rollout_id: str
    scopes: frozenset[str]


class RolloutKeyService:
    """Makes keys and finds their rollouts; those seen lately without asking the store."""

    def __init__(
        self,
        store: KeyStore,
        *,
        clock: Callable[[], float] = time.monotonic,
        others: SharedLog | None = None,
    ) -> None:
        """`others`: the other workers of the proxy."""
        self._store = store
        self._others = others
        if others is not None:
            others.subscribe("revoked", self._forget)
            others.when_lost(self._forget_all)
        self._owners: TTLCache[bytes, KeyOwner] = TTLCache(REMEMBERED, REMEMBERED_S, timer=clock)
        self._refused: TTLCache[bytes, bool] = TTLCache(REFUSED, REFUSED_S, timer=clock)
        self._lookups = asyncio.Semaphore(LOOKUPS)
        self._revocations = 0

    async def mint(self, rollout_id: str, scopes: Collection[KeyScope] = (CALLS,)) -> str:
        """A new key; it is not to be had again. Raises Unavailable."""
        key = f"{API_KEY_PREFIX}{rollout_id}.{secrets.token_urlsafe(SECRET_BYTES)}"
        hashed = hash_key(key)
        scope = " ".join(sorted(set(scopes)))
        await _stored(self._store.add_key, rollout_id, hashed, scope)
        self._owners[hashed] = KeyOwner(rollout_id, scope)
        return key

    async def add(self, rollout_id: str, key: str, scope: KeyScope) -> None:
        """Keep a key that was made elsewhere; again, or after its revocation, changes nothing.
        Raises Unavailable."""
        hashed = hash_key(key)
        if hashed not in self._owners and hashed not in self._refused:
            await _stored(self._store.add_key, rollout_id, hashed, scope)

    async def revoke(self, rollout_id: str) -> None:
        """None of the rollout's keys opens anything from now on. Raises Unavailable."""
        await _stored(self._store.revoke_keys, rollout_id)
        self._forget(rollout_id)
        if self._others is not None:
            self._others.publish("revoked", rollout_id)

    def _forget_all(self) -> None:
        self._revocations += 1
        self._owners.clear()

    def _forget(self, rollout_id: str) -> None:
        self._revocations += 1
        for hashed, owner in list(self._owners.items()):
            if owner.rollout_id == rollout_id:
                self._owners.pop(hashed, None)

    async def lookup(self, key: str) -> KeyGrant | None:
        """What the key was made for; None for any other key. Raises Unavailable."""
        named = SECRET_KEY.fullmatch(key)
        if named is None:
            return None
        hashed = hash_key(key)
        owner = self._owners.get(hashed)
        if owner is None:
            if hashed in self._refused:
                return None
            owner = await self._looked_up(hashed)
        if owner is None or not hmac.compare_digest(owner.rollout_id.encode(), named[1].encode()):
            self._refused[hashed] = True
            return None
        return KeyGrant(owner.rollout_id, frozenset(owner.scope.split()))

    async def _looked_up(self, hashed: bytes) -> KeyOwner | None:
        async with self._lookups:
            revocations = self._revocations
            owner = await _stored(self._store.key_owner, hashed)
        # What was read before a revocation may be wrong after it: it counts for this call alone.
        if owner is not None and revocations == self._revocations:
            self._owners[hashed] = owner
        return owner


async def _stored(method: Callable[..., T], *args: object) -> T:
    try:
        return await run_in_thread(method, *args)
    except StoreUnavailable as error:
        raise Unavailable(
            f"the store's keys cannot be read or written: {error}", code="store_unavailable"
        ) from error
