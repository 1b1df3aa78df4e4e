"""Reading a rollout costs its tokens once, and proves every one of them."""

from __future__ import annotations

from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.store.corruption import set_columns
from support.store.events import chain, make_turn
from tracegrad.events import Turn, token_id_array
from tracegrad.store import Store, StoreCorrupt
from tracegrad.store.encoding import blobs
from tracegrad.store.encoding.blobs import ContextDigest, array_content, pack_blobs
from tracegrad.store.read import turns as reading

pytestmark = pytest.mark.databases("sqlite")  # of rows that were read


def conversation(length: int, rollout: str = "r") -> list[Turn]:
    return chain(rollout, length, new=lambda n: range(n, n + 30), sampled=range(10))


def test_a_path_is_hashed_once_however_long_it_is(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = conversation(50)
    store.append(turns)
    hashed = []
    add = ContextDigest.add

    def counting(self: ContextDigest, ids: array[int]) -> ContextDigest:
        hashed.append(len(ids))
        return add(self, ids)

    monkeypatch.setattr(blobs.ContextDigest, "add", counting)
    assert store.rollout_turns("r") == turns
    assert sum(hashed) == 50 * 40


def test_no_two_turns_have_one_array(store: Store) -> None:
    turns = conversation(4)
    fork = make_turn("fork", parent=turns[1], new=[7, 7])
    store.append([*turns, fork])
    found = store.rollout_turns("r")
    for turn in found:
        turn.prompt_token_ids[0] = -1
        turn.prompt_token_ids.append(5)
        turn.completion_token_ids.append(6)
    lengths = [len(turn.prompt_token_ids) - 1 for turn in [*turns, fork]]
    assert [len(turn.prompt_token_ids) - 2 for turn in found] == lengths
    assert store.rollout_turns("r") == [*turns, fork]


@pytest.mark.databases("sqlite", "postgres")
def test_rollouts_that_were_written_in_turns_are_read_each_in_order(store: Store) -> None:
    rollouts = {name: conversation(5, name) for name in ("b", "a", "c")}
    for number in range(5):
        store.append([turns[number] for turns in rollouts.values()])
    with store.reading() as connection:
        found = reading.load_turns(connection, ["c", "none", "a", "b"])
    assert found == {**rollouts, "none": []}
    assert list(found) == ["c", "none", "a", "b"]


def test_tokens_that_are_gone_are_noticed(store: Store) -> None:
    store.append([make_turn("a", new=[1], sampled=[])])
    set_columns(store, "a", delta=b"")
    with pytest.raises(StoreCorrupt, match="turn a"):
        store.rollout_turns("r")


@pytest.mark.parametrize("column", ["delta", "completion"])
def test_a_change_within_a_path_is_noticed_where_it_is(store: Store, column: str) -> None:
    turns = conversation(4)
    store.append(turns)
    [blob] = pack_blobs([array_content(token_id_array(range(1, 31 if column == "delta" else 11)))])
    set_columns(store, "r.2", **{column: blob})  # as many tokens as before, but others
    for turn_id in ("r.2", "r.3"):
        with pytest.raises(StoreCorrupt, match=r"turn r\.2: its tokens are not the ones"):
            store.find_turn(turn_id)
    assert store.find_turn("r.1") == turns[1]


def test_a_digest_goes_on_from_a_copy_and_leaves_the_first_as_it_was() -> None:
    first = ContextDigest().add(token_id_array([1, 2]))
    value = first.value()
    followed = first.copy().add(token_id_array([3]))
    assert followed.value() == ContextDigest().add(token_id_array([1, 2, 3])).value()
    assert first.value() == value


@pytest.mark.databases("sqlite", "postgres")
def test_many_threads_read_at_once_also_after_one_found_damage(store: Store) -> None:
    rollouts = {name: conversation(6, name) for name in "abcdefgh"}
    store.append([turn for turns in rollouts.values() for turn in turns])
    set_columns(store, "h.3", delta=b"")
    whole = [*"abcdefg"] * 4
    with ThreadPoolExecutor(16) as pool:
        damaged = [pool.submit(store.rollout_turns, "h") for _ in range(4)]
        found = list(pool.map(store.rollout_turns, whole))
    assert found == [rollouts[name] for name in whole]
    assert all(isinstance(one.exception(), StoreCorrupt) for one in damaged)
