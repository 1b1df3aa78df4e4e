"""How far the store is from a batch, and what became of rewards; on both databases."""

from __future__ import annotations

import time

from support.store.events import rollout_events
from support.store.ledger_fixtures import commit, fill, lease
from support.store.ledger_fixtures import ledger as ledger
from tracegrad.events import Outcome, Reward
from tracegrad.store import Ledger, Store, lease_by_rollout
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
    assert (found.groups, found.attempts, found.without_task) == (2, {1: 1}, 1)
    assert found.states == {
        "waiting": 6,
        "leased": 2,
        "no_reward": 1,
        "named_reward": 1,
    }, "the lease consumed the one that is not scored"
    assert found.unscored == {"env_error": 1}
    assert sum(found.leased.values()) == 2
    assert found.newest == now - 49
    assert ledger.readiness(group_size=2, tags={"split": "x"}).states["not_selected"] >= 10


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
