"""How far the store is from a batch, and what became of rewards; on both databases."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import insert, update

from support.store.events import rollout_events
from support.store.ledger_fixtures import FakeClock, commit, fill, ids, lease, turn_ids
from support.store.ledger_fixtures import fake_clock as fake_clock
from support.store.ledger_fixtures import ledger as ledger
from tracegrad.events import Outcome, Reward
from tracegrad.store import Group, Ledger, Store, lease_by_rollout
from tracegrad.store.ledger import ledger as ledger_module
from tracegrad.store.maintenance import RetentionRule, RolloutSelection, prune
from tracegrad.store.models import Leases, Rewards
from tracegrad.store.rows import column_values
from tracegrad.store.types import JUDGE_SOURCE


def test_an_empty_store_has_nothing(ledger: Ledger) -> None:
    found = ledger.readiness(group_size=2)
    assert (found.is_empty, found.groups, found.attempts, found.newest) == (True, 0, {}, None)


def test_groups_attempts_and_states_are_counted(store: Store, ledger: Ledger) -> None:
    fill(store, tasks=3, size=2)
    now = time.time()
    store.append(rollout_events("alone", task="alone", at=now - 50))
    store.append(rollout_events("untitled", task=None))
    store.append(rollout_events("unrewarded", task="u", reward=None))
    store.append(rollout_events("failed", task="f", outcome=Outcome.ENV_ERROR))
    store.append(
        [
            *rollout_events("named", task="n", reward=None),
            Reward(rollout_id="named", value=1.0, name="score"),
        ]
    )
    lease(ledger, groups=1)
    found = ledger.readiness(group_size=2)
    assert (found.groups, found.attempts) == (2, {1: 1})
    assert found.states == {
        "waiting": 5,
        "no_task": 1,
        "leased": 2,
        "no_reward": 1,
        "named_reward": 1,
    }, "the lease consumed the one that is not scored"
    assert found.unscored == {"env_error": 1}
    assert sum(found.leased.values()) == 2
    assert found.newest == now - 49
    assert ledger.readiness(group_size=2, tags={"split": "x"}).states["not_selected"] >= 10
    alone = ledger.readiness(group_size=1)
    assert (alone.groups, alone.states["waiting"]) == (6, 6), "one without a task is a group"


def test_a_reward_that_arrives_after_the_lease_is_late_but_a_judges_is_not(
    store: Store, ledger: Ledger
) -> None:
    fill(store, tasks=2, size=1)
    groups = lease(ledger, groups=1, size=1)
    [leased] = [rollout.rollout_id for rollout in groups[0].rollouts]
    [free] = {"t0.0", "t1.0"} - {leased}
    judged = Reward(rollout_id=leased, value=0.5, source=JUDGE_SOURCE)
    for rollout_id in (leased, free, "nobody"):
        store.append([Reward(rollout_id=rollout_id, value=0.25, created_at=time.time() + 1)])
    store.append([judged])
    targets = {each.rollout_id: each for each in store.reward_targets([leased, free, "nobody"])}
    assert {name: (each.is_known, each.state) for name, each in targets.items()} == {
        leased: (True, "leased"),
        free: (True, "open"),
        "nobody": (False, "open"),
    }
    found = store.late_rewards()
    assert (found.rewards, found.rollouts) == (1, 1)
    turns = [turn.turn_id for turn in groups[0].rollouts[0].turns]
    leases = lease_by_rollout(groups)
    commit(ledger, step=1, trained=turns, rollouts=[leased], leases=leases)
    [target] = store.reward_targets([leased])
    assert (target.state, target.step) == ("trained", 1)
    assert store.late_rewards().rewards == 1
    assert store.late_rewards(after=found.last).rewards == 0


HOUR = 3600.0


@pytest.mark.parametrize("skew", [-HOUR, 0.0, HOUR])
def test_no_clock_says_whether_a_reward_came_late(
    store: Store, ledger: Ledger, skew: float
) -> None:
    """The proxy's clock, of `created_at`, is that far from the database's, of leases."""
    fill(store, tasks=1, size=1)
    early, late = (
        Reward(rollout_id="t0.0", value=value, created_at=time.time() + skew)
        for value in (0.25, 0.5)
    )
    store.append([early])
    [group] = lease(ledger, groups=1, size=1)
    assert group.rollouts[0].reward == 0.25
    assert store.late_rewards().rewards == 0
    store.append([late])
    for _ in range(2):
        detail = store.rollout("t0.0")
        assert [detail.came_late(each) for each in detail.rewards] == [False, False, True]
        assert store.late_rewards().rewards == 1
        assert store.late_reward_ids([early.reward_id, late.reward_id]) == {late.reward_id}
        if detail.summary.state == "leased":
            turns = [turn.turn_id for turn in group.rollouts[0].turns]
            leases = lease_by_rollout([group])
            commit(ledger, step=1, trained=turns, rollouts=["t0.0"], leases=leases)


def test_after_a_lease_that_was_given_back_the_next_one_counts(
    store: Store, ledger: Ledger
) -> None:
    fill(store, tasks=1, size=1)
    groups = lease(ledger, groups=1, size=1)
    store.append([revised := Reward(rollout_id="t0.0", value=0.5)])
    assert store.late_reward_ids([revised.reward_id])
    ledger.release(groups)
    assert not store.late_reward_ids([revised.reward_id])
    [group] = lease(ledger, groups=1, size=1)
    assert group.rollouts[0].reward == 0.5
    assert not store.late_reward_ids([revised.reward_id])


def test_a_lease_without_a_number_has_only_its_time(store: Store, ledger: Ledger) -> None:
    """Of before revision 0010."""
    fill(store, tasks=1, size=1)
    lease(ledger, groups=1, size=1)
    times = {"before": -HOUR, "after": HOUR}
    store.append(
        [
            Reward(rollout_id="t0.0", reward_id=name, value=1.0, created_at=time.time() + skew)
            for name, skew in times.items()
        ]
    )
    assert store.late_reward_ids([*times]) == {"before", "after"}
    with store.exclusive() as connection:
        connection.execute(update(Leases).values(newest_reward=None))
    assert store.late_reward_ids([*times]) == {"after"}


def test_training_takes_no_reward_of_a_turn_that_came_after_the_lease(
    store: Store, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups are read in a transaction of their own, after the lease is committed."""
    fill(store, tasks=1, size=1)
    store.append([Reward(rollout_id="t0.0", value=0.25, turn=0)])
    load = ledger_module.load_groups

    def load_later(*args: Any, **kwargs: Any) -> Any:
        store.append([Reward(rollout_id="t0.0", value=0.75, turn=0)])
        return load(*args, **kwargs)

    monkeypatch.setattr(ledger_module, "load_groups", load_later)
    [group] = lease(ledger, groups=1, size=1)
    assert group.rollouts[0].turn_rewards == {0: 0.25}
    assert store.late_rewards().rewards == 1


@pytest.mark.databases("postgres")
def test_a_reward_that_was_numbered_early_and_committed_late_is_late(
    store: Store, ledger: Ledger
) -> None:
    """Its transaction began before the lease, and one of another rollout's reward overtook it."""
    fill(store, tasks=2, size=1)
    slow = Reward(rollout_id="t0.0", value=0.75, created_at=time.time() - HOUR)
    with store.appending() as connection:
        connection.execute(insert(Rewards), column_values(slow, Rewards))
        store.append([Reward(rollout_id="t1.0", value=0.5)])  # has a higher number
        groups = lease(ledger, groups=2, size=1)
    rewards = {each.rollout_id: each.reward for group in groups for each in group.rollouts}
    assert rewards["t0.0"] != slow.value
    assert rewards["t1.0"] == 0.5
    assert store.late_reward_ids([slow.reward_id]) == {slow.reward_id}
    assert (store.late_rewards().rewards, store.late_rewards().rollouts) == (1, 1)


@pytest.mark.databases("postgres")
def test_of_two_rewards_at_once_the_one_with_the_higher_number_counts(
    store: Store, ledger: Ledger
) -> None:
    """Both of one rollout, committed the other way round: the order of numbers is the order of
    arrival everywhere, so that the one that training lacks was revised, and is not late."""
    fill(store, tasks=1, size=1)
    slow = Reward(rollout_id="t0.0", value=0.75)
    with store.appending() as connection:
        connection.execute(insert(Rewards), column_values(slow, Rewards))
        store.append([Reward(rollout_id="t0.0", value=0.5)])
        [group] = lease(ledger, groups=1, size=1)
    assert group.rollouts[0].reward == 0.5 == store.rollout("t0.0").summary.reward
    assert store.late_rewards().rewards == 0


def test_only_what_was_consumed_since_the_last_step_is_counted(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    fill(store, tasks=4, size=2)
    first, second, third, fourth = lease(ledger, groups=4)

    def pass_over(group: Group) -> None:
        skipped = dict.fromkeys(turn_ids(group), "stale")
        ledger.commit_skipped(skipped, ids([group])[0], lease_by_rollout([group]))
        fake_clock.advance(1)

    pass_over(first)
    assert ledger.readiness(group_size=2).passed == {"stale": 4}
    commit(ledger, [second])
    fake_clock.advance(1)
    assert ledger.readiness(group_size=2).passed == {}
    pass_over(third)
    assert ledger.readiness(group_size=2).passed == {"stale": 4}
    skipped = dict.fromkeys(turn_ids(fourth), "non_finite")
    commit(ledger, [fourth], step=2, trained=[], skipped=skipped)
    assert "non_finite" not in ledger.readiness(group_size=2).passed, "a step's own are its"


def test_a_step_whose_rollouts_were_pruned_still_bounds_what_was_consumed(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    fill(store, tasks=3, size=2)
    before, of_the_step, after = lease(ledger, groups=3)

    def pass_over(group: Group) -> None:
        skipped = dict.fromkeys(turn_ids(group), "stale")
        ledger.commit_skipped(skipped, ids([group])[0], lease_by_rollout([group]))
        fake_clock.advance(1)

    pass_over(before)
    commit(ledger, [of_the_step], created_at=fake_clock.now)
    fake_clock.advance(1)
    of = RolloutSelection(rollouts=tuple(ids([of_the_step])[0]))
    assert prune(store, RetentionRule(selection=of))["rollouts"] == 2
    assert ledger.readiness(group_size=2).passed == {}
    pass_over(after)
    assert ledger.readiness(group_size=2).passed == {"stale": 4}


def test_what_is_left_of_a_task_is_a_smaller_group_in_time(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    """Not one rollout alone, which is never a group."""
    store.append(rollout_events("alone", task="a", at=fake_clock.now - 500))
    assert ledger.readiness(group_size=4, incomplete_after_s=600).smaller_in_s is None
    for n, age_s in enumerate((400, 101)):
        store.append(rollout_events(f"b{n}", task="b", at=fake_clock.now - age_s))
    found = ledger.readiness(group_size=4, incomplete_after_s=600)
    assert found.smaller_in_s == pytest.approx(500.0)
