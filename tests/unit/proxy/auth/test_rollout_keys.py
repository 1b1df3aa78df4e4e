"""Keys of rollouts: made once, kept as hashes, looked up rarely."""

from __future__ import annotations

import asyncio
import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.proxy.key_store import SECRET, Cupboard
from tracegrad.protocol import ROLLOUT_ID_PATTERN
from tracegrad.proxy.auth.rollout_keys import (
    LOOKUPS,
    REFUSED,
    REFUSED_S,
    REMEMBERED_S,
    RolloutKeyService,
    rollout_in_key,
)
from tracegrad.proxy.http.errors import Unavailable
from tracegrad.store.write.api_keys import KeyOwner


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def owner(keys: RolloutKeyService, key: str) -> str | None:
    granted = await keys.lookup(key)
    return None if granted is None else granted.rollout_id


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(cupboard: Cupboard, clock: Clock) -> RolloutKeyService:
    return RolloutKeyService(cupboard, clock=clock)


async def test_only_a_keys_hash_is_kept(keys: RolloutKeyService, cupboard: Cupboard) -> None:
    one, other = await keys.mint("a.b"), await keys.mint("a.b")
    assert one != other
    assert re.fullmatch(r"tg-a\.b\.[A-Za-z0-9_-]{43}", one), "256 bits"
    digests = [hashlib.sha256(key.encode()).digest() for key in (one, other)]
    assert cupboard.hashes == dict.fromkeys(digests, KeyOwner("a.b", "calls"))
    assert await owner(keys, one) == await owner(keys, other) == "a.b"


async def test_a_key_is_for_what_it_was_minted_for(
    keys: RolloutKeyService, cupboard: Cupboard
) -> None:
    for scopes in (["calls"], ["events"], ["events", "calls"]):
        key = await keys.mint("r1", scopes)  # type: ignore[arg-type]
        for known in (keys, RolloutKeyService(cupboard)):
            assert await known.lookup(key) == ("r1", frozenset(scopes))


async def test_the_hot_path_asks_nobody(
    keys: RolloutKeyService, cupboard: Cupboard, clock: Clock
) -> None:
    key = await keys.mint("r1")
    assert await owner(keys, key) == "r1"
    assert cupboard.lookups == 0, "what was made here is known here"
    later = RolloutKeyService(cupboard, clock=clock)  # the proxy was restarted
    for _ in range(3):
        assert await owner(later, key) == "r1"
    assert cupboard.lookups == 1
    clock.now += REMEMBERED_S
    assert await owner(later, key) == "r1"
    assert cupboard.lookups == 2


async def test_an_unknown_key_is_asked_for_once_in_a_while(
    keys: RolloutKeyService, cupboard: Cupboard, clock: Clock
) -> None:
    stranger = f"tg-r1.{SECRET}"
    for _ in range(3):
        assert await owner(keys, stranger) is None
    assert cupboard.lookups == 1
    clock.now += REFUSED_S
    assert await owner(keys, stranger) is None
    assert cupboard.lookups == 2


async def test_made_up_keys_push_no_real_one_out(
    keys: RolloutKeyService, cupboard: Cupboard
) -> None:
    key = await keys.mint("r1")
    for number in range(REFUSED + 100):
        assert await owner(keys, f"tg-r1.{number:043d}") is None
    asked = cupboard.lookups
    assert await owner(keys, key) == "r1"
    assert cupboard.lookups == asked
    assert len(keys._refused) == REFUSED


@pytest.mark.parametrize(
    "key", ["", "tg-", "tg-r1", "tg-r1.short", f"sk-r1.{SECRET}", f"tg-r 1.{SECRET}", "x" * 50]
)
async def test_what_is_no_key_is_not_looked_up(
    keys: RolloutKeyService, cupboard: Cupboard, key: str
) -> None:
    assert await owner(keys, key) is None
    assert cupboard.lookups == 0


async def test_a_key_says_nothing_for_another_rollout(
    keys: RolloutKeyService, cupboard: Cupboard
) -> None:
    """Whatever the store says: a key opens the rollout whose name it bears."""
    key = f"tg-mine.{SECRET}"
    cupboard.hashes[hashlib.sha256(key.encode()).digest()] = KeyOwner("theirs", "calls")
    assert await owner(keys, key) is None


async def test_a_revoked_key_opens_nothing(keys: RolloutKeyService, cupboard: Cupboard) -> None:
    mine, theirs = await keys.mint("mine"), await keys.mint("theirs")
    await keys.revoke("mine")
    assert await owner(keys, mine) is None
    assert await owner(keys, theirs) == "theirs"


async def test_a_lookup_under_way_does_not_outlive_a_revocation(cupboard: Cupboard) -> None:
    key = await RolloutKeyService(cupboard).mint("r1")
    keys = RolloutKeyService(cupboard)
    cupboard.door.clear()
    lookup = asyncio.create_task(owner(keys, key))
    while not cupboard.lookups:  # noqa: ASYNC110
        await asyncio.sleep(0.001)  # it is set in another thread
    await keys.revoke("r1")
    cupboard.door.set()
    await lookup
    assert await owner(keys, key) is None


async def test_strangers_do_not_take_all_threads(
    keys: RolloutKeyService, cupboard: Cupboard
) -> None:
    cupboard.door.clear()
    asked = [asyncio.create_task(owner(keys, f"tg-r.{number:043d}")) for number in range(20)]
    while cupboard.inside < LOOKUPS:  # noqa: ASYNC110
        await asyncio.sleep(0.001)  # it is set in another thread
    await asyncio.sleep(0.02)
    cupboard.door.set()
    assert await asyncio.gather(*asked) == [None] * 20
    assert cupboard.most_inside == LOOKUPS


async def test_a_store_that_is_away_refuses_nobody(
    keys: RolloutKeyService, cupboard: Cupboard
) -> None:
    known = await keys.mint("r1")
    other = await RolloutKeyService(cupboard).mint("r1")
    cupboard.broken = True
    assert await owner(keys, known) == "r1"
    for ask in (owner(keys, other), keys.mint("r2"), keys.revoke("r1")):
        with pytest.raises(Unavailable, match="disk is full"):
            await ask
    cupboard.broken = False
    assert await owner(keys, other) == "r1", "a failed lookup is not remembered as a refusal"


@given(
    st.from_regex(ROLLOUT_ID_PATTERN, fullmatch=True).filter(lambda name: not name.endswith("\n"))
)
def test_a_key_names_its_rollout_whatever_that_is_called(rollout_id: str) -> None:
    assert rollout_in_key(f"tg-{rollout_id}.{SECRET}") == rollout_id
    if not re.search(r"\.[A-Za-z0-9_-]{43}$", rollout_id):
        assert rollout_in_key(f"tg-{rollout_id}") == rollout_id
