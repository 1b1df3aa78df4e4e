"""A lease is a fence: it is renewed while it is held, and nothing is consumed past it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from support.store.ledger_fixtures import FakeClock, commit, fill, ids, lease
from support.store.ledger_fixtures import fake_clock as fake_clock
from support.store.ledger_fixtures import ledger as ledger
from tracegrad.store import (
    AlreadyTrained,
    LeaseLost,
    Ledger,
    LedgerError,
    StepRecord,
    Store,
    lease_by_rollout,
)
from tracegrad.store.databases import statements


def everything(store: Store, ledger: Ledger) -> Any:
    return store.turn_counts(), store.rollouts(limit=None), ledger.steps()


# Renewal


def test_a_lease_that_is_renewed_outlives_its_time(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    fill(store, tasks=1, size=2)
    groups = lease(ledger, ttl_s=10)
    for _ in range(5):
        fake_clock.advance(9)
        assert ledger.renew(lease_by_rollout(groups), ttl_s=10) == []
        assert lease(ledger, owner="other") == []
    [held] = ledger.leases("t0.0")
    assert held.leased_until == fake_clock.now + 10
    # A dead process' leases expire, however long it had renewed them.
    fake_clock.advance(10)
    assert ids(lease(ledger, owner="other")) == ids(groups)


@pytest.mark.parametrize("renewed", [True, False])
def test_a_lease_that_ran_out_and_that_nobody_took_is_its_holders_still(
    store: Store, ledger: Ledger, fake_clock: FakeClock, renewed: bool
) -> None:
    fill(store, tasks=1, size=2)
    groups = lease(ledger, ttl_s=10)
    fake_clock.advance(1000)
    if renewed:
        assert ledger.renew(lease_by_rollout(groups), ttl_s=10) == []
        assert lease(ledger, owner="other") == []
    commit(ledger, groups)
    assert store.turn_counts().trained == 4


def test_renewing_names_what_is_lost_and_renews_the_rest(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    fill(store, tasks=4, size=2)
    groups = lease(ledger, groups=4, ttl_s=10)
    leases = lease_by_rollout(groups)
    ledger.release(groups[1:2])
    commit(ledger, groups[2:3])
    fake_clock.advance(11)
    [taken] = lease(ledger, owner="thief", ttl_s=60)
    assert ids([taken]) == ids(groups[:1])
    lost = {each.rollout_id: each for each in ledger.renew(leases, ttl_s=10)}
    assert {name: each.state for name, each in lost.items()} == {
        "t0.0": "leased", "t0.1": "leased", "t1.0": "free", "t1.1": "free",
        "t2.0": "consumed", "t2.1": "consumed",
    }  # fmt: skip
    assert str(lost["t0.0"]) == (
        f"rollout t0.0 is no longer under lease {groups[0].lease_id}: thief has it now"
    )
    assert "nobody has it now" in str(lost["t1.0"])
    assert str(lost["t2.0"]) == "rollout t2.0 was consumed by step 1 already"
    assert ledger.leases("t3.0")[-1].leased_until == fake_clock.now + 10
    assert ledger.leases("t0.0")[0].leased_until < fake_clock.now, "the thief's time is its own"


def test_renewing_what_was_removed_says_so(ledger: Ledger) -> None:
    [lost] = ledger.renew({"gone": "lease"}, ttl_s=10)
    assert (lost.state, str(lost)) == ("removed", "rollout gone was removed from the store")
    assert ledger.renew({}, ttl_s=10) == []
    with pytest.raises(ValueError, match="ttl_s"):
        ledger.renew({"gone": "lease"}, ttl_s=0)


def test_what_the_asker_holds_itself_is_not_given_out_again(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    """Nor is it, where its lease ran out: it would be in one batch twice."""
    fill(store, tasks=2, size=2)
    [first] = lease(ledger, ttl_s=10)
    fake_clock.advance(11)
    assert ids(lease(ledger, groups=2, at_least=1, held=ids([first])[0])) == [["t1.0", "t1.1"]]


# Fences


def test_a_commit_past_a_lease_that_another_has_is_refused_whole(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    fill(store, tasks=2, size=2)
    groups = lease(ledger, groups=2, owner="slow", ttl_s=10)
    fake_clock.advance(11)
    [taken] = lease(ledger, owner="quick")
    before = everything(store, ledger)
    with pytest.raises(LeaseLost, match=r"rollout t0\.0 is no longer under .*: quick has it now"):
        commit(ledger, groups)
    with pytest.raises(LeaseLost, match="quick has it now"):
        ledger.commit_skipped({}, ids(groups)[0], lease_by_rollout(groups))
    assert everything(store, ledger) == before
    commit(ledger, [taken])
    with pytest.raises(AlreadyTrained):
        commit(ledger, groups, step=2)
    commit(ledger, groups[1:], step=2)


def test_a_commit_without_the_lease_that_there_is_is_refused(store: Store, ledger: Ledger) -> None:
    fill(store, tasks=1, size=2)
    groups = lease(ledger, owner="holder")
    with pytest.raises(LeaseLost, match=r"rollout t0\.0 is leased to holder"):
        commit(ledger, groups, leases={})
    with pytest.raises(LeaseLost, match="holder has it now"):
        commit(ledger, groups, leases=dict.fromkeys(ids(groups)[0], "made up"))
    ledger.release(groups)
    with pytest.raises(LeaseLost, match="nobody has it now"):
        commit(ledger, groups)


def test_a_rollout_is_consumed_once(store: Store, ledger: Ledger) -> None:
    """Also where no turn of it is named."""
    fill(store, tasks=1, size=2)
    groups = lease(ledger)
    commit(ledger, groups)
    with pytest.raises(AlreadyTrained, match=r"rollout t0\.0 was consumed by step 1 already"):
        commit(ledger, groups, step=2, trained=[])
    assert store.rollout("t0.0").summary.consumed_step == 1


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"trained": ["t0.0.0", "t0.0.1", "t0.0.0"]}, r"turn t0\.0\.0 is named twice"),
        ({"rollouts": ["t0.0", "t0.1", "t0.1"]}, r"rollout t0\.1 is named twice"),
    ],
)
def test_a_step_that_names_something_twice_is_refused(
    store: Store, ledger: Ledger, more: dict[str, Any], named: str
) -> None:
    fill(store, tasks=1, size=2)
    groups = lease(ledger)
    before = everything(store, ledger)
    with pytest.raises(LedgerError, match=named):
        commit(ledger, groups, **more)
    assert everything(store, ledger) == before


# Steps follow steps


def test_a_step_says_who_made_it_and_with_what(ledger: Ledger) -> None:
    step = StepRecord(
        step=1, version=1, checkpoint="a/step-1", run_id="run a", manifest_digest="11"
    )
    ledger.commit_step(step, trained=[], skipped={}, rollouts=[])
    assert ledger.last_step() == step
    with pytest.raises(
        LedgerError,
        match=r"step 1 is in the ledger already: run run a committed it \(checkpoint a/step-1\)",
    ):
        ledger.commit_step(StepRecord(step=1, version=1), trained=[], skipped={}, rollouts=[])


def test_a_step_of_weights_that_were_never_committed_is_refused(ledger: Ledger) -> None:
    first = StepRecord(step=1, version=1, manifest_digest="11")
    ledger.commit_step(first, trained=[], skipped={}, rollouts=[])
    with pytest.raises(LedgerError, match="step 2 began with weights that no committed step has"):
        ledger.commit_step(
            StepRecord(step=2, version=2, parent_digest="22"), trained=[], skipped={}, rollouts=[]
        )
    second = StepRecord(step=2, version=2, parent_digest="11")
    ledger.commit_step(second, trained=[], skipped={}, rollouts=[])
    assert ledger.steps() == [first, second]


# Clocks of machines that disagree


def test_a_trainer_whose_clock_is_an_hour_ahead_takes_nothing_from_others(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases end by the server's clock."""
    with Store.open(postgres_url) as store:
        ledger = Ledger(store)
        fill(store, tasks=1, size=2)
        groups = lease(ledger, ttl_s=600, owner="on time")
        real = time.time
        with monkeypatch.context() as ahead:
            ahead.setattr(time, "time", lambda: real() + 3600)
            assert lease(ledger, owner="ahead") == []
            assert ledger.ready() == 0
        with monkeypatch.context() as behind:
            behind.setattr(time, "time", lambda: real() - 3600)
            ledger.renew(lease_by_rollout(groups), ttl_s=600)
        assert lease(ledger, owner="other") == []
        assert abs(ledger.leases("t0.0")[0].leased_at - real()) < 600
        commit(ledger, groups)


def test_a_clock_that_jumps_costs_work_and_trains_nothing_twice(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's clock is the machine's; whatever it says, the fence holds."""
    with Store.open(sqlite_url) as store:
        ledger = Ledger(store)
        fill(store, tasks=1, size=2)
        groups = lease(ledger, ttl_s=600, owner="slow")
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 3600)
        taken = lease(ledger, ttl_s=600, owner="quick")
        assert ids(taken) == ids(groups)
        monkeypatch.undo()
        with pytest.raises(LeaseLost):
            commit(ledger, groups)
        commit(ledger, taken)
        assert store.turn_counts().trained == 4


def test_the_databases_clock_is_read_at_that_moment(store: Store) -> None:
    with store.exclusive() as connection:
        first = statements.server_time(connection)
        while (second := statements.server_time(connection)) == first:
            pass
        assert second > first, "not the transaction's beginning"
