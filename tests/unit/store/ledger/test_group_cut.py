"""Groups are cut to their size; what they are cut by is kept, and skipped with its reason."""

from __future__ import annotations

from hashlib import sha256

from support.store.events import make_turn, rollout_events
from support.store.ledger_fixtures import FakeClock, commit, ids, lease
from support.store.ledger_fixtures import fake_clock as fake_clock
from support.store.ledger_fixtures import ledger as ledger
from tracegrad.events import Outcome, Reward, RolloutFinished, RolloutStarted
from tracegrad.store import Ledger, Store
from tracegrad.store.ledger.leases import OverSample

FIRST, DRAWN = OverSample(2, "first"), OverSample(2, "drawn")


def attempt(store: Store, number: int, *, task: str = "t", at: float = 1000.0) -> str:
    name = f"{task}.{number}"
    store.append(rollout_events(name, task=task, at=at + number / 10))
    return name


def skipped(store: Store) -> dict[str, int]:
    return dict(store.turn_counts().skipped)


def test_a_group_is_its_first_finished_attempts(store: Store, ledger: Ledger) -> None:
    for number in range(4):
        attempt(store, number)
    [group] = lease(ledger, over_sample=FIRST)
    assert ids([group]) == [["t.0", "t.1"]]
    assert skipped(store) == {"over_sampled": 4}, "two rollouts of two turns"
    commit(ledger, [group])
    assert lease(ledger, at_least=1, incomplete_after_s=0.0) == []
    assert len(store.rollout_turns("t.3")) == 2, "all of it is kept"


def test_an_attempt_that_still_runs_is_skipped_when_it_ends(store: Store, ledger: Ledger) -> None:
    attempt(store, 0)
    attempt(store, 1)
    store.append([RolloutStarted(rollout_id="slow", task_id="t", opened_at=1000.5)])
    store.append([make_turn("s1", "slow")])
    [group] = lease(ledger, over_sample=FIRST)
    assert skipped(store) == {}
    commit(ledger, [group])
    late = [
        make_turn("s2", "slow"),
        Reward(rollout_id="slow", value=1.0, created_at=2000.0),
        RolloutFinished(rollout_id="slow", outcome=Outcome.COMPLETED, finished_at=2000.0),
    ]
    store.append(late)
    assert lease(ledger, at_least=1, incomplete_after_s=0.0) == []
    assert skipped(store) == {"over_sampled": 2}


def test_attempts_of_a_later_group_of_the_task_are_left_alone(store: Store, ledger: Ledger) -> None:
    for number in range(3):
        attempt(store, number)
    for number in range(2):
        attempt(store, 10 + number, at=5000.0)
    [group] = lease(ledger, over_sample=FIRST)
    assert ids([group]) == [["t.0", "t.1"]]
    assert skipped(store) == {"over_sampled": 2}, "the third attempt's"
    commit(ledger, [group])
    [later] = lease(ledger, over_sample=FIRST)
    assert ids([later]) == [["t.10", "t.11"]]


def test_drawn_attempts_wait_for_all_and_do_not_depend_on_who_was_first(
    store: Store, ledger: Ledger
) -> None:
    names = [attempt(store, number) for number in range(3)]
    assert lease(ledger, over_sample=DRAWN) == []
    names.append(attempt(store, 3))
    drawn = sorted(names, key=lambda name: sha256(name.encode()).digest())[:2]
    [group] = lease(ledger, over_sample=DRAWN)
    assert ids([group]) == [sorted(drawn)]
    assert skipped(store) == {"over_sampled": 4}


def test_a_drawn_group_that_nobody_makes_up_is_taken_as_it_is(store: Store, ledger: Ledger) -> None:
    for number in range(3):
        attempt(store, number)
    [group] = lease(ledger, over_sample=DRAWN, incomplete_after_s=60.0, at_least=1)
    assert len(group.rollouts) == 2


def test_without_more_attempts_nothing_is_cut(store: Store, ledger: Ledger) -> None:
    for number in range(3):
        attempt(store, number)
    [group] = lease(ledger)
    commit(ledger, [group])
    assert skipped(store) == {}


def test_a_group_that_is_given_back_is_the_same_again(store: Store, ledger: Ledger) -> None:
    for number in range(4):
        attempt(store, number)
    group = lease(ledger, over_sample=FIRST)
    ledger.release(group)
    assert ids(lease(ledger, over_sample=FIRST)) == ids(group)


def test_an_attempt_that_a_group_was_cut_by_is_not_cut_by_the_next_one_too(
    store: Store, ledger: Ledger
) -> None:
    attempt(store, 0)
    attempt(store, 1)
    store.append([RolloutStarted(rollout_id="slow", task_id="t", opened_at=1000.5)])
    store.append([make_turn("s1", "slow")])
    commit(ledger, lease(ledger, over_sample=FIRST))
    for number in range(4):
        attempt(store, 10 + number, at=5000.0)
    assert ids(lease(ledger, over_sample=FIRST)) == [["t.10", "t.11"]]
    assert skipped(store) == {"over_sampled": 4}, "both of the new ones, though one still runs"


def test_what_the_asker_holds_itself_takes_no_place_of_what_is_cut(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    for number in range(2):
        attempt(store, number)
    held = ids(lease(ledger, ttl_s=5))[0]
    fake_clock.advance(6)  # free for others by now
    for number in range(2, 6):
        attempt(store, number)
    assert ids(lease(ledger, over_sample=FIRST, held=held)) == [["t.2", "t.3"]]
    assert skipped(store) == {"over_sampled": 4}, "the fifth and sixth attempt's"
