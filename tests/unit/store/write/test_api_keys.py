"""Keys of rollouts: found by their hash, valid before the rollout opens, until revoked."""

from __future__ import annotations

import hashlib

import pytest
from sqlalchemy import select, text

from support.store.query_plans import uses_index
from tracegrad.events import RolloutStarted
from tracegrad.store import Store
from tracegrad.store.models import RolloutKeys


def hashed(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def test_a_key_names_its_rollout_until_it_is_revoked(store: Store, url: str) -> None:
    store.add_key("r1", hashed("a"), "calls")
    store.add_key("r1", hashed("b"), "calls events")
    store.add_key("r2", hashed("c"), "events")
    assert [store.key_owner(hashed(key)) for key in "abcd"] == [
        ("r1", "calls"),
        ("r1", "calls events"),
        ("r2", "events"),
        None,
    ]
    assert store.rollouts() == [], "a key makes no rollout"
    store.append([RolloutStarted(rollout_id="r1")])
    with Store.open(url) as other:
        assert other.key_owner(hashed("a")) == ("r1", "calls")
        assert other.revoke_keys("r1") == 2
    assert [store.key_owner(hashed(key)) for key in "abc"] == [None, None, ("r2", "events")]
    assert store.revoke_keys("r1") == 0


def test_a_key_that_is_known_stays_as_it_is(store: Store) -> None:
    store.add_key("r1", hashed("a"), "calls")
    store.add_key("r2", hashed("a"), "events")
    assert store.key_owner(hashed("a")) == ("r1", "calls")
    store.revoke_keys("r1")
    store.add_key("r1", hashed("a"), "calls")
    assert store.key_owner(hashed("a")) is None, "what is revoked is not minted again"


@pytest.mark.parametrize("key_hash", [b"", b"tg-secret", hashed("a").hex().encode()])
def test_only_a_hash_is_taken(store: Store, key_hash: bytes) -> None:
    with pytest.raises(ValueError, match=r"key_hash: \d+ bytes; give the key's SHA-256"):
        store.add_key("r", key_hash, "calls")
    with pytest.raises(ValueError, match="rollout_id: it is empty"):
        store.add_key("", hashed("a"), "calls")
    with pytest.raises(ValueError, match="scope: it is empty"):
        store.add_key("r", hashed("a"), "")


def test_keys_are_found_through_an_index(store: Store) -> None:
    for condition in (RolloutKeys.key_hash == b"0", RolloutKeys.rollout_id == "r"):
        assert uses_index(store, select(RolloutKeys).where(condition)), condition


def test_the_secret_is_nowhere_in_the_file(store: Store) -> None:
    store.add_key("r", hashed("tg-very-secret"), "calls")
    with store.reading() as connection:
        [row] = connection.execute(text("SELECT key_hash, rollout_id FROM rollout_keys"))
    assert tuple(row) == (hashed("tg-very-secret"), "r")
