"""Keys minted for rollouts: only their hashes are here."""

from __future__ import annotations

import time
from typing import NamedTuple

from sqlalchemy import Connection, select, update

from tracegrad.store.databases import insert_new
from tracegrad.store.models import RolloutKeys
from tracegrad.store.write.events import check_length

HASH_BYTES = 32  # SHA-256


class KeyOwner(NamedTuple):
    """`scope` is what the key is for, as words with spaces between."""

    rollout_id: str
    scope: str


def add_key(connection: Connection, rollout_id: str, key_hash: bytes, scope: str = "calls") -> None:
    """Remember a key by the SHA-256 digest of its secret; also before the rollout opens.

    `scope` is what it is for. A hash that is known already stays as it is.
    """
    if len(key_hash) != HASH_BYTES:
        raise ValueError(f"key_hash: {len(key_hash)} bytes; give the key's SHA-256 digest")
    if not rollout_id:
        raise ValueError("rollout_id: it is empty")
    check_length("rollout_id", rollout_id)
    if not scope:
        raise ValueError("scope: it is empty; say what the key is for, such as calls")
    row = {
        "key_hash": key_hash,
        "rollout_id": rollout_id,
        "created_at": time.time(),
        "scope": scope,
    }
    connection.execute(insert_new(connection, RolloutKeys), row)


def key_owner(connection: Connection, key_hash: bytes) -> KeyOwner | None:
    """The rollout that the key was minted for, and for what; None: it is unknown, or revoked."""
    query = select(RolloutKeys.rollout_id, RolloutKeys.scope).where(
        RolloutKeys.key_hash == key_hash, RolloutKeys.revoked_at.is_(None)
    )
    row = connection.execute(query).one_or_none()
    return None if row is None else KeyOwner(*row)


def revoke_keys(connection: Connection, rollout_id: str) -> int:
    """How many keys of the rollout that were valid are not any more."""
    return connection.execute(
        update(RolloutKeys)
        .where(RolloutKeys.rollout_id == rollout_id, RolloutKeys.revoked_at.is_(None))
        .values(revoked_at=time.time())
    ).rowcount
