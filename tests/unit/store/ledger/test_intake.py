"""Trainers say how many rollouts they want, and drivers hold places: in every database."""

from __future__ import annotations

import threading

import pytest

from support.store.events import make_turn, rollout_events
from support.store.intake_requests import intake_request
from support.store.ledger_fixtures import FakeClock, commit, lease
from support.store.ledger_fixtures import fake_clock as fake_clock
from tracegrad.events import Outcome, RolloutStarted
from tracegrad.store import Ledger, Store
from tracegrad.store.ledger.intake import (
    DEAD_AFTER_S,
    PLACE_TTL_S,
    GrantedPlaces,
    Intake,
    IntakeState,
)
from tracegrad.store.ledger.leases import OverSample


@pytest.fixture
def intake(store: Store) -> Intake:
    return Intake(store)


def room(intake: Intake) -> int | None:
    return intake.state(wanted=1).capacity.rollouts


def open_rollout(store: Store, rollout_id: str, clock: FakeClock, **more: object) -> None:
    fields = {"task_id": "t", "opened_at": clock.now, **more}
    store.append([RolloutStarted(rollout_id=rollout_id, **fields)])  # type: ignore[arg-type]


def test_without_a_trainer_everything_may_be_opened(intake: Intake) -> None:
    found = intake.ask(5)
    assert len(set(found.rollout_ids)) == 5
    assert found.state == IntakeState(paced=False, capacity=found.state.capacity)
    assert room(intake) is None
    assert len(intake.ask().rollout_ids) == 1, "nobody says what a group is"


def test_places_are_given_until_the_bound_and_count_as_open(
    intake: Intake, store: Store, fake_clock: FakeClock
) -> None:
    intake.request(intake_request(in_flight=4, version=7))
    first = intake.ask()
    assert (len(first.rollout_ids), first.state.version) == (2, 7)
    second = intake.ask(2)
    refused = intake.ask(1)
    assert refused.rollout_ids == []
    assert refused.state.reason == "data.in_flight = 4: 4 open, 0 waiting to be trained"
    assert refused.state.retry_after_s > 0
    for place in [*first.rollout_ids, *second.rollout_ids]:
        open_rollout(store, place, fake_clock)
    fake_clock.advance(PLACE_TTL_S + 1)
    intake.renew("me")
    assert room(intake) == 0, "the rollouts stand where their places did"


def test_a_place_that_nobody_opens_is_free_again(intake: Intake, fake_clock: FakeClock) -> None:
    intake.request(intake_request(in_flight=4))
    intake.ask(4)
    assert room(intake) == 0
    fake_clock.advance(PLACE_TTL_S - 1)
    intake.renew("me")
    assert room(intake) == 0
    fake_clock.advance(2)
    assert room(intake) == 4


def test_a_place_counts_until_the_rollout_is_known_to_be_open(
    intake: Intake, store: Store, fake_clock: FakeClock
) -> None:
    """Its first call may be stored before its opening, which has the tags."""
    intake.request(intake_request(in_flight=4, tags={"split": "train"}))
    [place, _] = intake.ask(2).rollout_ids
    store.append([make_turn("t", place, created_at=fake_clock.now)])
    assert room(intake) == 2
    open_rollout(store, place, fake_clock, tags={"split": "train"})
    assert room(intake) == 2


def test_a_rollout_that_nobody_opens_is_not_counted_twice(
    intake: Intake, store: Store, fake_clock: FakeClock
) -> None:
    intake.request(intake_request(in_flight=4))
    [place] = intake.ask(1).rollout_ids
    store.append([make_turn("t", place, created_at=fake_clock.now)])
    assert room(intake) == 3


def test_all_places_or_none(intake: Intake) -> None:
    intake.request(intake_request(in_flight=5))
    intake.ask(4)
    assert intake.ask(2).rollout_ids == []
    assert len(intake.ask(1).rollout_ids) == 1
    with pytest.raises(ValueError, match=r"rollouts: 6 .*data\.in_flight"):
        intake.ask(6)


def test_drivers_who_ask_at_once_never_get_more_than_there_is(intake: Intake) -> None:
    intake.request(intake_request(in_flight=8))
    found: list[str] = []

    def drive() -> None:
        for _ in range(4):
            found.extend(intake.ask(2).rollout_ids)

    threads = [threading.Thread(target=drive) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(set(found)) == 8


def test_a_rollout_takes_a_place_from_its_opening_until_its_step_is_served(
    intake: Intake, store: Store, fake_clock: FakeClock
) -> None:
    """Not until the step's commit, which waits for a checkpoint."""
    wanted = intake_request(max_staleness=0, synchronous=True)
    intake.request(wanted)
    for n in range(4):
        store.append(rollout_events(f"r{n}", task=f"t{n // 2}", at=fake_clock.now + n))
    refused = intake.ask(2)
    assert refused.state.limits is not None
    assert refused.state.counts is not None
    assert (refused.state.capacity.rollouts, refused.state.counts.waiting) == (0, 4)
    groups = lease(Ledger(store), groups=2)
    state = intake.ask(2).state
    assert state.counts is not None
    assert (state.capacity.rollouts, state.counts.leased) == (0, 4)
    assert "data.synchronous: 0 open, 0 waiting to be trained, 4 in the step" in state.reason
    intake.request(intake_request(max_staleness=0, synchronous=True, version=1,
                                  made=[groups[0].lease_id]), stepped=True)  # fmt: skip
    assert room(intake) == 4
    commit(Ledger(store), groups)
    assert room(intake) == 4


def test_max_staleness_leaves_room_for_as_many_batches(
    intake: Intake, store: Store, fake_clock: FakeClock
) -> None:
    intake.request(intake_request(max_staleness=2))
    assert room(intake) == 3 * 4
    for n in range(3):
        store.append(rollout_events(f"r{n}", task=f"t{n}", at=fake_clock.now, reward=None))
    open_rollout(store, "open", fake_clock)
    assert room(intake) == 3 * 4 - 4, "what waits for its reward takes a place too"


def test_what_ended_without_a_score_takes_no_place(
    intake: Intake, store: Store, fake_clock: FakeClock
) -> None:
    intake.request(intake_request(in_flight=4))
    store.append(rollout_events("r", outcome=Outcome.INFRA_ERROR, at=fake_clock.now))
    assert room(intake) == 4


def test_other_tags_take_no_place(intake: Intake, store: Store, fake_clock: FakeClock) -> None:
    intake.request(intake_request(in_flight=4, tags={"split": "train"}))
    open_rollout(store, "exam", fake_clock, tags={"split": "held_out"})
    assert room(intake) == 4
    open_rollout(store, "mine", fake_clock, tags={"split": "train"})
    assert room(intake) == 3


def test_rollouts_of_drivers_that_are_gone_block_nobody_for_ever(
    intake: Intake, store: Store, fake_clock: FakeClock
) -> None:
    intake.request(intake_request(in_flight=4, silent_s=100.0))
    open_rollout(store, "silent", fake_clock)
    open_rollout(store, "calls", fake_clock)
    store.append(rollout_events("unrewarded", reward=None, at=fake_clock.now))
    store.append(rollout_events("lone", task="lone", at=fake_clock.now))
    assert room(intake) == 0
    fake_clock.advance(58)
    intake.renew("me")
    store.append([make_turn("t", "calls", created_at=fake_clock.now)])
    fake_clock.advance(45)
    intake.renew("me")
    assert room(intake) == 3, "the one that had a call stands for itself"


def test_a_whole_group_takes_its_places_however_long_it_waits(
    intake: Intake, store: Store, fake_clock: FakeClock
) -> None:
    intake.request(intake_request(in_flight=4, silent_s=100.0))
    for n in range(2):
        store.append(rollout_events(f"r{n}", at=fake_clock.now + n))
    fake_clock.advance(500)
    intake.renew("me")
    assert room(intake) == 2


def test_what_another_trainer_leased_takes_no_place(
    intake: Intake, store: Store, fake_clock: FakeClock
) -> None:
    for n in range(2):
        store.append(rollout_events(f"r{n}", at=fake_clock.now + n))
    lease(Ledger(store), owner="other")
    intake.request(intake_request(max_staleness=0))
    assert room(intake) == 4


def test_attempts_that_were_cut_and_still_run_make_no_group(
    intake: Intake, store: Store, fake_clock: FakeClock
) -> None:
    """Else the next batch would wait for what it is not made of."""
    intake.request(intake_request(groups=1, attempts=4, in_flight=4))
    for n in range(2):
        store.append(rollout_events(f"r{n}", task="t", at=fake_clock.now + n))
        open_rollout(store, f"slow{n}", fake_clock)
    ledger = Ledger(store)
    commit(ledger, lease(ledger, over_sample=OverSample(2, "first")))
    state = intake.state()
    assert state.counts is not None
    assert (state.counts.open, state.counts.cut, state.counts.groups) == (2, 2, 0)
    assert (state.capacity.rollouts, state.reason) == (4, "")


def test_a_trainer_that_died_holds_nobody_back(intake: Intake, fake_clock: FakeClock) -> None:
    intake.request(intake_request(in_flight=4))
    intake.ask(4)
    fake_clock.advance(DEAD_AFTER_S - 1)
    assert intake.state().paced
    fake_clock.advance(2)
    state = intake.state()
    assert (state.paced, state.capacity.rollouts) == (False, None)
    assert state.silent_for_s == pytest.approx(DEAD_AFTER_S + 1)
    intake.renew("me")
    assert intake.state().paced
    intake.withdraw("me")
    assert intake.state().silent_for_s is None


def test_of_several_trainers_the_one_with_more_room_decides(intake: Intake) -> None:
    intake.request(intake_request(owner="a", in_flight=4))
    intake.request(intake_request(owner="b", in_flight=6))
    assert room(intake) == 6


def test_the_time_that_drivers_waited_is_summed(intake: Intake, fake_clock: FakeClock) -> None:
    intake.request(intake_request(in_flight=8))
    began = intake.now()
    fake_clock.advance(1)
    intake.ask(2, waited_s=3.0)
    intake.ask(2, waited_s=0.5)
    between = intake.now()  # at once: what is given at that moment is counted once
    assert intake.granted(after=began, until=between) == GrantedPlaces(4, 3.5)
    assert intake.granted(after=between, until=between + 9) == GrantedPlaces(0, 0.0)


def test_a_refusal_says_when_to_ask_again(intake: Intake, fake_clock: FakeClock) -> None:
    intake.request(intake_request(max_staleness=0, step_s=8.0), stepped=True)
    intake.ask(4)
    fake_clock.advance(3)
    intake.request(intake_request(max_staleness=0, step_s=8.0))  # not by a step
    assert intake.ask(2).state.retry_after_s == pytest.approx(5.0)


def test_a_rollout_that_begins_waits_for_those_that_have_begun(
    intake: Intake, store: Store, fake_clock: FakeClock
) -> None:
    """Opened without a place: five are open, and none has begun."""
    intake.request(intake_request(in_flight=4, tags={"split": "train"}))
    for n in range(5):
        open_rollout(store, f"r{n}", fake_clock, tags={"split": "train"})
    assert [intake.begin(f"r{n}").reason for n in range(4)] == [""] * 4
    assert intake.begin("r4").reason.startswith("data.in_flight = 4")
    assert intake.begin("r0").reason == "", "it has its place"
    assert intake.begin("not opened").reason == ""
    assert not intake.needs_place("r0")
    assert intake.needs_place("r4")
    assert not intake.needs_place("not opened")
    assert (intake.is_opened("r4"), intake.is_opened("not opened")) == (True, False)
