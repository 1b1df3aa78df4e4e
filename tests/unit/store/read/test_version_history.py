"""How versions stand, by what happened and what was decided; on both databases."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracegrad.store import Decision, Ledger, PolicyVersion, StepRecord, Store
from tracegrad.store.read.versions import VersionHistory, given_up_versions, version_numbers


def happened(store: Store, version: int, state: Any, weights: int, **detail: Any) -> None:
    event = PolicyVersion(
        version, weights or None, state, detail={"weights_step": weights, **detail}
    )
    if state in ("kept", "not_kept", "evaluated"):
        store.note_version(event)
    else:
        store.record_version(event)


def decided(store: Store, kind: Any, of: int | None = None, **outcome: Any) -> None:
    training = outcome.pop("training", None)
    given = Decision(kind=kind, version=of, training=training, by="ann@host", reason="why")
    told = outcome or ({} if of is None else {"version": of})
    store.close_decision(store.decide(given), told)


def target_of(history: VersionHistory) -> int | str:
    try:
        return history.rollback_target()
    except ValueError as error:
        return str(error)


def states(store: Store) -> dict[int, str]:
    return {one.version: one.state for one in store.version_history().records.values()}


def test_a_rollback_and_what_comes_after_it(store: Store) -> None:
    for version in range(4):
        happened(store, version, "serving", version)
        happened(store, version, "kept", version, bytes=5)
    decided(store, "promote", 1)
    assert states(store) == {0: "served", 1: "promoted", 2: "served", 3: "served"}
    happened(store, 1, "serving", 1)
    decided(store, "rollback", None, training="pause", version=1, newest=3, last_step=3)
    happened(store, 4, "superseded", 4)
    assert store.current_version() == 1
    assert states(store) == {
        0: "served", 1: "promoted", 2: "rolled_back", 3: "rolled_back", 4: "superseded",
    }  # fmt: skip
    pause = store.training_pause()
    assert pause is not None
    assert pause.kind == "rollback"
    happened(store, 5, "serving", 1)  # the same weights under a number of their own
    history = store.version_history()
    assert history.serving == 5
    assert history.records[5].state == "promoted"
    assert history.numbers_of(1) == [1, 5]
    assert history.rollback_target() == 0
    happened(store, 6, "serving", 6)
    assert states(store)[6] == "served", "it came after the rollback"
    decided(store, "resume")
    assert store.training_pause() is None
    assert store.version_history().paused is None


def test_a_rollback_gives_up_weights_whatever_their_numbers(store: Store) -> None:
    """Version 2 has version 1's weights: a run resumed with them."""
    for version, weights in enumerate((0, 1, 1, 3)):
        happened(store, version, "serving", weights)
    decided(store, "promote", 3)
    decided(store, "pause")
    decided(store, "rollback", None, training="continue", version=1, newest=3, last_step=3)
    assert states(store) == {0: "served", 1: "promoted", 2: "promoted", 3: "rolled_back"}
    history = store.version_history()
    assert history.promoted == 1, "what was given up is nothing to compare with"
    assert history.paused is None
    assert store.training_pause() is None
    decided(store, "rollback", None, training="pause", version=3, newest=3, last_step=3)
    assert states(store)[3] == "promoted", "somebody went back to it after all"


def test_a_refused_promotion_leaves_what_few_versions_say_of_the_promoted_one(
    store: Store,
) -> None:
    for version in range(3):
        happened(store, version, "serving", version)
    decided(store, "promote", 1)
    decided(store, "promote", 0, refused="version: 0 is not kept on disk")
    assert store.version_history([]).promoted == store.version_history().promoted == 1


def test_training_goes_on_from_what_was_returned_to_until_a_step_is_committed(
    store: Store,
) -> None:
    for version in range(3):
        happened(store, version, "serving", version)
    assert store.version_history().rollback_base(2) is None
    decided(store, "rollback", None, training="continue", version=1, newest=2, last_step=2)
    base = store.version_history().rollback_base(2)
    assert base is not None
    assert base.version == 1
    assert store.version_history().rollback_base(3) is None


def test_a_refused_decision_changes_nothing(store: Store) -> None:
    happened(store, 0, "serving", 0)
    decided(store, "pause", refused="no")
    decided(store, "promote", 0, refused="no")
    history = store.version_history()
    assert (history.paused, history.promoted) == (None, None)
    assert store.training_pause() is None
    decided(store, "pause")
    decided(store, "resume", refused="no")
    assert store.training_pause() is not None


def test_a_version_of_a_step_that_another_made_is_lost(store: Store) -> None:
    """It was pushed and killed before its commit; the step was made again, as another version."""
    happened(store, 0, "serving", 0)
    happened(store, 1, "serving", 1)
    happened(store, 2, "serving", 1)
    made = StepRecord(step=1, version=2)
    Ledger(store).commit_step(made, trained=[], skipped={}, rollouts=[])
    assert states(store) == {0: "served", 1: "lost", 2: "served"}
    for version in (0, 1):
        happened(store, version, "kept", version, bytes=5)
    assert store.version_history().kept_before(1) == 0, "what is lost is nothing to go back to"
    assert store.version_history().numbers_of(2) == [2]


def test_the_checkpoints_of_kept_versions_are_known(store: Store) -> None:
    happened(store, 1, "kept", 1, bytes=5)
    happened(store, 3, "kept", 2, bytes=5)
    assert store.kept_steps() == {1, 2}
    happened(store, 1, "not_kept", 1, reason="beyond_keep")
    assert store.kept_steps() == {2}


def test_what_can_be_returned_to(store: Store) -> None:
    with pytest.raises(ValueError, match="nothing is served yet"):
        store.version_history().rollback_target()
    happened(store, 0, "serving", 0)
    happened(store, 1, "failed", 1)
    happened(store, 2, "serving", 2)
    history = store.version_history()
    with pytest.raises(ValueError, match="no good version before 2 is kept on disk"):
        history.rollback_target()
    with pytest.raises(ValueError, match="there is no version 7; the newest is 2"):
        history.check_target(7)
    with pytest.raises(ValueError, match=r"1 was never served \(failed\)"):
        history.check_target(1)
    happened(store, 0, "kept", 0, bytes=5)
    assert store.version_history().rollback_target() == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_history_of_few_versions_says_of_them_what_the_whole_one_does(
    store: Store, seed: int
) -> None:
    drawn = random.Random(seed)
    for step in range(1, 9):
        made = StepRecord(step=step, version=step + drawn.randrange(3))
        Ledger(store).commit_step(made, trained=[], skipped={}, rollouts=[])
    newest = 0
    for _ in range(60):
        version = drawn.randrange(12)
        newest = max(newest, version)
        what = drawn.choice(["serving", "kept", "not_kept", "failed", "evaluated", "decide"])
        if what != "decide":
            happened(
                store, version, what, drawn.randrange(9), gate=drawn.choice(["none", "canary"])
            )
            continue
        kind = drawn.choice(["promote", "pin", "unpin", "pause", "resume", "rollback"])
        of = None if kind in ("pause", "resume") else version
        past = {"version": version, "newest": newest, "last_step": 8} if kind == "rollback" else {}
        training = drawn.choice(["continue", "pause"]) if kind == "rollback" else None
        decided(store, kind, of, training=training, **past)
    whole = store.version_history()
    for asked in ([], [3], [0, 7, 11, 40]):
        some = store.version_history(asked)
        assert {*asked} & {*whole.records} <= {*some.records}
        assert some.records == {version: whole.records[version] for version in some.records}
        assert (some.kept(), max(some.records)) == (whole.kept(), max(whole.records))
        for name in ("serving", "promoted", "promoted_at", "paused", "rollback", "refused"):
            assert getattr(some, name) == getattr(whole, name), name
        for version in range(newest + 1):
            assert some.kept_before(version) == whole.kept_before(version)
        assert target_of(some) == target_of(whole)


@pytest.mark.parametrize("before", [None, 3, 0])
def test_versions_come_in_pages(store: Store, before: int | None) -> None:
    for version in (0, 1, 2, 5):
        happened(store, version, "serving", version)
        happened(store, version, "kept", version)
    with store.reading() as connection:
        found = version_numbers(connection, 2, before=before)
    assert found == {None: [5, 2], 3: [2, 1], 0: []}[before]


@given(st.data())
def test_given_up_is_what_the_weights_of_now_do_not_come_from(data: st.DataObject) -> None:
    """Against parents: each version is made of the one before, or of what was returned to."""
    parents: dict[int, int | None] = {0: None}
    rollbacks, now = [], 0
    for _ in range(data.draw(st.integers(0, 5))):
        for _ in range(data.draw(st.integers(0, 4))):
            parents[max(parents) + 1], now = now, max(parents) + 1
        now = data.draw(st.sampled_from(sorted(parents)))
        rollbacks.append((now, max(parents)))
    line, at = set(), now
    while at is not None:
        line.add(at)
        at = parents[at]  # type: ignore[assignment]
    found = given_up_versions(rollbacks)
    gone = {version for first, last in found for version in range(first, last + 1)}
    assert gone == (set(parents) - line if rollbacks else set())
    assert all(first <= last for first, last in found)


def test_a_rollback_that_was_refused_gives_nothing_up(store: Store) -> None:
    for version in range(4):
        happened(store, version, "serving", version)
    assert store.rolled_back_versions() == []
    decided(store, "rollback", 9, training="continue", refused="version: there is no version 9")
    again: Any = {"version": 1, "training": "pause", "by": "ann@host", "reason": "later"}
    store.decide(Decision(kind="rollback", **again))
    assert store.rolled_back_versions() == []
    store.close_decision(store.open_decisions()[0].seq or 0, {"version": 1, "newest": 3})
    assert store.rolled_back_versions() == [(2, 3)]
