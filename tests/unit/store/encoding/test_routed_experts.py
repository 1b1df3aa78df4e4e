"""Routed experts: packed, read back to the byte, only where they are asked for, and cared for."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.store.corruption import set_columns
from support.store.doctor_findings import found
from support.store.events import make_turn, rollout_events
from support.store.maintenance import drop, selection
from support.trainer.routing_files import experts_of, routing_file
from tracegrad.events import RolloutStarted, Turn
from tracegrad.store import EventRejected, Ledger, Store, StoreCorrupt
from tracegrad.store.copy.export_records import iter_rollouts, iter_task_groups
from tracegrad.store.encoding.blobs import json_content, pack_blobs, routing_content, unpack_routing
from tracegrad.store.encoding.routed_experts import check_routing, routing_shape
from tracegrad.store.maintenance import RedactionRule, examine, redact
from tracegrad.store.maintenance.sizes import all_bytes
from tracegrad.store.read.steps import StepHistory

KINDS = st.sampled_from(["|u1", "<u2", "<i4"])
SIDE = st.integers(1, 70)

pytestmark = pytest.mark.databases("sqlite")  # blobs are the same in each


def packed(file: bytes) -> bytes:
    [blob] = pack_blobs([routing_content(file)])
    return blob


@given(SIDE, st.integers(1, 6), st.integers(1, 9), KINDS, st.integers(0, 2**32 - 1))
def test_a_file_comes_back_to_the_byte(n: int, layers: int, k: int, kind: str, seed: int) -> None:
    chance = np.random.default_rng(seed)
    items = chance.integers(0, 1 << 31, (n, layers, k)).astype(kind)
    file = routing_file(items)
    assert unpack_routing(packed(file)) == file
    assert routing_shape(file)[:4] == (n, layers, k, items.itemsize)


def test_many_are_packed_at_once_with_what_else_there_is() -> None:
    files = [experts_of(n, layers=16) for n in (3, 700, 40)]
    blobs = pack_blobs([*map(routing_content, files), json_content({"a": 1})])
    assert [unpack_routing(blob) for blob in blobs[:3]] == files


def test_a_layers_favourites_make_it_smaller() -> None:
    """8 of 128 experts, 48 layers: 384 bytes a token as they come."""
    for tokens, most in ((60, 355), (2000, 315)):
        file = experts_of(tokens, layers=48, k=8, experts=128)
        assert len(packed(file)) / tokens < most
    # 512 experts: the upper byte of two holds one bit.
    wide = experts_of(500, layers=8, k=10, experts=512, kind="<u2")
    assert len(packed(wide)) < 0.65 * len(wide)


def test_what_is_no_such_file_is_refused() -> None:
    good = experts_of(4)
    arrays = [np.zeros((4, 3)), np.zeros((4, 3, 2)), np.zeros((0, 3, 2), np.uint8),
              np.zeros((4, 3, 2), np.int64), np.zeros((4, 3, 2), ">i4"),
              np.asfortranarray(np.zeros((4, 3, 2), np.uint8))]  # fmt: skip
    for bad in (b"", b"x" * 200, good[:-1], good + b"\0", good[:40], *map(routing_file, arrays)):
        with pytest.raises(ValueError, match=r"array|file"):
            routing_shape(bad)
    with pytest.raises(ValueError, match="4 tokens of a turn of 4"):
        check_routing(good, 4)
    assert check_routing(good, 5).tokens == 4


def routed(turn: Turn, tokens: int, seed: int = 0) -> Turn:
    return replace(turn, routed_experts=experts_of(tokens, seed=seed))


def two() -> list[Turn]:
    """Five tokens, and five more."""
    root = routed(make_turn("t0", created_at=1.0, request={"a": "b" * 200}), 4)
    child = routed(make_turn("t1", parent=root, created_at=2.0, request={"a": "b" * 201}), 5, 1)
    return [root, child]


@pytest.mark.databases("sqlite", "postgres")
def test_they_are_read_where_they_are_asked_for(store: Store, url: str) -> None:
    turns = two()
    store.append(turns)
    store.append(turns)
    bare = [replace(turn, routed_experts=None) for turn in turns]
    with Store.open(url) as again:
        assert again.rollout_turns("r") == turns
        assert again.rollout_turns("r", expert_routing=False) == bare
        assert (again.find_turn("t1"), again.find_turn("t1", expert_routing=False)) == (
            turns[1],
            bare[1],
        )
        assert next(iter_rollouts(again)).turns == turns
        assert next(iter_rollouts(again, expert_routing=False)).turns == bare
        assert next(iter_task_groups(again))[0].turns == bare
        assert again.rollout("r").turns == bare
        again.append([RolloutStarted(rollout_id="r", task_id="g")])
        assert next(iter_task_groups(again))[0].turns == bare


def test_the_trainer_gets_them(store: Store) -> None:
    _, root, child, *rest = rollout_events("r")
    assert isinstance(root, Turn)
    assert isinstance(child, Turn)
    turns = [routed(root, 4), routed(child, 5)]
    store.append([*turns, *rest])
    ledger, history = Ledger(store), StepHistory(store)
    for routes in (True, False):
        expected = [turn.routed_experts if routes else None for turn in turns]
        found = [ledger.preview(groups=1, group_size=1,
        expert_routing=routes).groups[0].rollouts[0],
                 history.samples({"r": 1.0}, expert_routing=routes)["r"]]  # fmt: skip
        assert [[turn.routed_experts for turn in one.turns] for one in found] == [expected] * 2
    [group] = ledger.lease(groups=1, group_size=1, owner="me", ttl_s=60)
    assert group.rollouts[0].turns[1].routed_experts == turns[1].routed_experts


@pytest.mark.parametrize("file", [b"no file", experts_of(5), experts_of(4)[:-1]])
def test_those_of_other_tokens_are_not_stored(store: Store, file: bytes) -> None:
    with pytest.raises(EventRejected, match="routed_experts: turn t: "):
        store.append([replace(make_turn("t"), routed_experts=file)])
    assert store.rollout_turns("r") == []


def test_dropped_text_leaves_them(store: Store) -> None:
    turns = two()
    store.append(turns)
    drop(store, before=1.5)
    assert store.rollout_turns("r") == [replace(turns[0], request=None), turns[1]]


def test_they_go_with_the_tokens(store: Store) -> None:
    turns = two()
    store.append(turns)

    def clean(turn: Turn) -> Turn:
        gone = turn.request == turns[1].request
        return replace(turn, request={}) if gone else turn

    rule = RedactionRule(selection=selection(), clean=clean, name="n", drop_tokens=True)  # type: ignore[arg-type]
    redact(store, rule)
    kept = store.rollout_turns("r")
    assert [turn.routed_experts for turn in kept] == [turns[0].routed_experts, None]
    assert kept[1].untrainable == "redacted"
    assert examine(store).ok


def test_the_doctor_finds_broken_ones(store: Store) -> None:
    store.append(two())
    assert found(store, "routes") == []
    whole = packed(experts_of(5))
    for blob, why in (
        (packed(experts_of(10)), "10 tokens of a turn of 10, whose last was never read"),
        (whole[:-9], "cut, or joined|cannot be read"),
        (b"\x01" + whole[1:], "unknown tag 01"),
        (b"", "unknown tag"),
    ):
        set_columns(store, "t1", routed_experts=blob)
        [finding] = found(store, "routes")
        assert finding.subject == "turn t1"
        assert re.search(why, finding.message), finding.message
        assert len(store.rollout_turns("r", expert_routing=False)) == 2


def test_broken_ones_are_not_given_out(store: Store) -> None:
    store.append(two())
    set_columns(store, "t1", routed_experts=packed(experts_of(5))[:-9])
    with pytest.raises(StoreCorrupt, match="turn t1: "):
        store.rollout_turns("r")


@pytest.mark.databases("sqlite", "postgres")
def test_their_room_is_counted(store: Store) -> None:
    def size() -> int:
        with store.reading() as connection:
            return all_bytes(connection)

    store.append([make_turn("t1")])
    before = size()
    blob = packed(experts_of(4))
    set_columns(store, "t1", routed_experts=blob)
    assert size() == before + len(blob)
