"""How many rollouts may be opened: closed forms, and what holds of all of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracegrad.store.ledger.intake_capacity import (
    MAX_RETRY_S,
    MIN_RETRY_S,
    UNKNOWN_RETRY_S,
    Capacity,
    IntakeCounts,
    IntakeLimits,
    fits,
    intake_capacity,
    retry_after_s,
)

ENOUGH = 10_000  # groups: the trainer lacks none, whatever else is said


def limits(**changes: int | bool | None) -> IntakeLimits:
    given: dict[str, int | bool | None] = {"groups": 2, "group_size": 4, "attempts": 4}
    return IntakeLimits(**(given | changes))  # type: ignore[arg-type]


def test_without_a_bound_any_number_may_be_opened() -> None:
    assert intake_capacity(limits(), IntakeCounts(open=500)) == Capacity(None)
    assert fits(Capacity(None), 10**9)


def test_in_flight_counts_what_is_open_and_what_waits_but_not_what_is_being_trained() -> None:
    counts = IntakeCounts(open=3, waiting=4, leased=8, groups=ENOUGH)
    assert intake_capacity(limits(in_flight=16), counts) == Capacity(9, "in_flight")
    assert intake_capacity(limits(in_flight=6), counts).rollouts == 0


@given(
    eta=st.integers(0, 8),
    version=st.integers(0, 1000),
    batch=st.integers(1, 64),
    running=st.integers(0, 600),
    kept=st.integers(0, 600),
)
def test_max_staleness_is_areals_formula(
    eta: int, version: int, batch: int, running: int, kept: int
) -> None:
    """`(eta + version + 1) * batch - (accepted + running)`, where each version has trained on
    `batch` of those that were accepted."""
    accepted = version * batch + kept
    theirs = (eta + version + 1) * batch - (accepted + running)
    ours = intake_capacity(
        IntakeLimits(groups=batch, group_size=1, attempts=1, max_staleness=eta),
        IntakeCounts(open=running, waiting=kept, groups=ENOUGH),
    )
    assert ours.rollouts == max(0, theirs)


def test_a_leased_group_stands_for_all_attempts_that_were_made_for_it() -> None:
    """Else over-sampling would open rollouts of the next batch while this one is trained."""
    synchronous = limits(attempts=6, max_staleness=0, synchronous=True)
    assert synchronous.batch == 12
    training = IntakeCounts(leased=8, groups=0)  # two groups of four, less two attempts each
    assert intake_capacity(synchronous, training) == Capacity(0, "synchronous", 1)
    assert intake_capacity(synchronous, IntakeCounts()).rollouts == 12


def test_attempts_that_were_cut_are_in_flight_and_not_ahead() -> None:
    counts = IntakeCounts(open=5, cut=2, groups=ENOUGH)
    assert intake_capacity(limits(in_flight=16), counts).rollouts == 11
    assert intake_capacity(limits(max_staleness=0), counts).rollouts == 5


def test_the_narrower_bound_holds_and_is_named() -> None:
    both = limits(in_flight=20, max_staleness=1)  # 20, and two batches of 8
    assert intake_capacity(both, IntakeCounts(groups=ENOUGH)) == Capacity(16, "max_staleness")
    full = IntakeCounts(waiting=4, groups=ENOUGH)
    assert intake_capacity(limits(in_flight=8, max_staleness=1), full).limit == "in_flight"


def test_groups_that_the_batch_lacks_may_always_be_opened() -> None:
    """Single attempts, or groups of equal rewards, fill the bounds, and make no batch."""
    lone = IntakeCounts(waiting=8, groups=0)
    assert intake_capacity(limits(in_flight=8, max_staleness=0), lone).rollouts == 8
    some_run = IntakeCounts(open=1, waiting=8, groups=0)
    assert intake_capacity(limits(in_flight=8, max_staleness=0), some_run).rollouts == 0
    held = IntakeCounts(leased=8, useless=1)
    assert intake_capacity(limits(max_staleness=0), held).rollouts == 4


def test_a_rollout_that_begins_is_held_back_by_those_that_began_alone() -> None:
    counts = IntakeCounts(open=30, begun=7, groups=ENOUGH)
    assert intake_capacity(limits(in_flight=8), counts).rollouts == 0
    assert intake_capacity(limits(in_flight=8), counts, of_begun=True).rollouts == 1


@given(
    groups=st.integers(1, 20),
    size=st.integers(1, 16),
    extra=st.integers(0, 8),
    in_flight=st.none() | st.integers(1, 1000),
    eta=st.none() | st.integers(0, 8),
    counts=st.builds(
        IntakeCounts,
        open=st.integers(0, 2000),
        waiting=st.integers(0, 2000),
        leased=st.integers(0, 500),
        groups=st.integers(0, 200),
    ),
    wanted=st.integers(1, 50),
)
def test_what_holds_of_every_capacity(
    groups: int,
    size: int,
    extra: int,
    in_flight: int | None,
    eta: int | None,
    counts: IntakeCounts,
    wanted: int,
) -> None:
    given_limits = IntakeLimits(
        groups=groups, group_size=size, attempts=size + extra, in_flight=in_flight,
        max_staleness=eta,
    )  # fmt: skip
    found = intake_capacity(given_limits, counts, wanted=wanted)
    if in_flight is None and eta is None:
        assert found.rollouts is None
        return
    assert found.rollouts is not None
    assert found.rollouts >= 0
    assert (found.steps == 0) == fits(found, wanted)
    # Nobody is blocked for ever: with nothing under way a whole batch may be opened.
    assert (intake_capacity(given_limits, IntakeCounts()).rollouts or 0) >= given_limits.batch
    # One more that is open leaves at most as much room.
    more = IntakeCounts(
        open=counts.open + 1, waiting=counts.waiting, leased=counts.leased, groups=counts.groups
    )
    after = intake_capacity(given_limits, more, wanted=wanted).rollouts
    assert after is not None
    assert after <= found.rollouts


@pytest.mark.parametrize(("short_by", "steps"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_as_many_steps_are_waited_for_as_make_the_room(short_by: int, steps: int) -> None:
    full = IntakeCounts(waiting=8 + short_by - 4, groups=ENOUGH)
    assert intake_capacity(limits(max_staleness=0), full, wanted=4).steps == steps


def test_the_wait_is_what_is_left_of_the_steps_that_make_room() -> None:
    two = Capacity(0, "max_staleness", 2)
    assert retry_after_s(two, step_s=4.0, since_step_s=3.0) == 5.0
    assert retry_after_s(two, step_s=4.0, since_step_s=60.0) == MIN_RETRY_S
    assert retry_after_s(two, step_s=600.0, since_step_s=0.0) == MAX_RETRY_S
    assert retry_after_s(two, step_s=None, since_step_s=None) == UNKNOWN_RETRY_S


def test_in_order_nothing_lags_further_than_the_bound() -> None:
    """Drivers that open whatever they may, and a trainer that takes the oldest first."""
    wanted = limits(max_staleness=3)
    opened_at: list[int] = []
    lags = []
    for version in range(50):
        room = intake_capacity(wanted, IntakeCounts(waiting=len(opened_at), groups=ENOUGH))
        opened_at += [version] * (room.rollouts or 0)
        batch, opened_at = opened_at[: wanted.batch], opened_at[wanted.batch :]
        lags += [version - at for at in batch]
    assert max(lags) == 3
    assert math.isclose(sum(lags[-80:]) / 80, 3.0), "as far ahead as allowed"
