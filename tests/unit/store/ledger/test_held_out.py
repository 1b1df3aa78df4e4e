"""Held-out rollouts are for evaluation: they are consumed with that reason, and never leased."""

from __future__ import annotations

from support.store.events import rollout_events
from tracegrad.store import Ledger, Store
from tracegrad.store.read.held_out import held_out_rollouts

HELD_OUT = {"split": "held_out"}


def lease(store: Store, tags: dict[str, str] | None = None) -> list[str]:
    groups = Ledger(store).lease(
        groups=1, group_size=2, owner="me", ttl_s=60, tags=tags, held_out=HELD_OUT
    )
    return sorted(one.rollout_id for group in groups for one in group.rollouts)


def test_they_are_never_leased_and_their_turns_have_the_reason(store: Store) -> None:
    for name in ("a", "b"):
        store.append(rollout_events(name, tags=HELD_OUT))
        store.append(rollout_events(f"train-{name}"))
    store.append(rollout_events("open", tags=HELD_OUT, outcome=None))
    store.append(rollout_events("unrewarded", tags=HELD_OUT, reward=None))
    assert lease(store) == ["train-a", "train-b"]
    counts = store.turn_counts({})
    assert counts.skipped == {"held_out": 4}
    assert counts.captured == counts.trained + 4 + sum(counts.pending.values())
    assert lease(store) == []
    assert store.turn_counts({}).skipped == {"held_out": 4}


def test_a_preview_has_none_of_them(store: Store) -> None:
    for name in ("a", "b"):
        store.append(rollout_events(name, tags=HELD_OUT))
    ledger = Ledger(store)
    assert len(ledger.preview(groups=1, group_size=2).groups) == 1
    assert ledger.preview(groups=1, group_size=2, held_out=HELD_OUT).groups == []
    assert ledger.readiness(group_size=2).groups == 1
    assert ledger.readiness(group_size=2, held_out=HELD_OUT).groups == 0


def test_where_training_selects_others_they_are_left_alone(store: Store) -> None:
    store.append(rollout_events("a", tags=HELD_OUT))
    assert lease(store, {"split": "train"}) == []
    assert store.turn_counts({"split": "train"}).skipped == {}


def test_they_are_read_by_the_versions_that_sampled_them(store: Store) -> None:
    store.append(rollout_events("b", tags=HELD_OUT, at=20, version=2, reward=0.5))
    store.append(rollout_events("a", tags=HELD_OUT, at=10, version=1))
    store.append(rollout_events("later", tags=HELD_OUT, at=10, version=3))
    store.append(rollout_events("train", at=10, version=1))
    store.append(rollout_events("unrewarded", tags=HELD_OUT, version=1, reward=None))
    lease(store)
    with store.reading() as connection:
        found = held_out_rollouts(connection, HELD_OUT, [1, 2])
    assert [(one.rollout_id, one.reward, one.versions) for one in found] == [
        ("a", 1.0, frozenset({1})),
        ("b", 0.5, frozenset({2})),
    ]
