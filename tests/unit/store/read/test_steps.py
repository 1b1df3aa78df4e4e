"""Looking back at steps, and ahead at what a lease would give; on both databases."""

from __future__ import annotations

import time
from typing import Any

from support.store.events import rollout_events
from support.store.ledger_fixtures import commit, fill, ids, lease
from support.store.ledger_fixtures import ledger as ledger
from tracegrad.events import Reward
from tracegrad.store import Ledger, PolicyVersion, StepHistory, Store


def test_a_preview_is_what_a_lease_would_give_and_changes_nothing(
    store: Store, ledger: Ledger
) -> None:
    fill(store, tasks=3, size=2)
    first = ledger.preview(groups=2, group_size=2)
    assert ids(first.groups) == [["t0.0", "t0.1"], ["t1.0", "t1.1"]]
    assert (first.more, first.incomplete) == (1, [])
    assert ids(ledger.preview(groups=2, group_size=2).groups) == ids(first.groups)
    assert store.turn_counts().pending == {"waiting": 12}, "nothing is leased"
    assert ledger.leases("t0.0") == []
    leased = lease(ledger, groups=2)
    assert [group.rollouts for group in leased] == [group.rollouts for group in first.groups]
    assert ids(ledger.preview(groups=2, group_size=2).groups) == [["t2.0", "t2.1"]], "fewer will do"


def test_a_preview_names_who_waits_for_whom(store: Store) -> None:
    now = time.time()
    store.append(rollout_events("a0", task="a", at=now - 50))
    store.append(rollout_events("a1", task="a", at=now - 40))
    store.append(rollout_events("a2", task="a", at=now, outcome=None))
    store.append(rollout_events("a3", task="a", at=now, reward=None))
    store.append(rollout_events("b0", task="b", at=now - 10))
    peek = Ledger(store).preview(groups=1, group_size=4, incomplete_after_s=60)
    assert peek.groups == []
    assert [task.task_id for task in peek.incomplete] == ["a", "b"]
    a = peek.incomplete[0]
    assert (a.ready, a.open, a.no_reward, a.since) == (["a0", "a1"], 1, 1, now - 49)
    stale = Ledger(store).preview(groups=1, group_size=4, incomplete_after_s=20)
    assert ids(stale.groups) == [["a0", "a1"]]
    assert [task.task_id for task in stale.incomplete] == ["b"]


def test_a_step_is_found_with_its_batch_and_in_short_without(store: Store, ledger: Ledger) -> None:
    history = StepHistory(store)
    assert (history.count(), history.steps(), history.step(1), history.before(1)) == (
        *(0, [], None),
        None,
    )
    for step in (1, 2, 4):
        more: dict[str, Any] = {"batch": {"groups": []} if step > 1 else None, "settings": {"a": 1}}
        commit(ledger, step=step, metrics={"loss": step / 4}, checkpoint=f"c{step}", **more)
    assert history.count() == 3
    assert [step.step for step in history.steps(2)] == [2, 4]
    assert [step.metrics for step in history.steps(2)] == [{"loss": 0.5}, {"loss": 1.0}]
    assert all(not step.settings and step.batch is None for step in history.steps())
    found = history.step(2)
    assert found is not None
    assert (found.batch, found.settings) == ({"groups": []}, {"a": 1})
    before = history.before(4)
    assert before is not None
    assert (before.step, before.checkpoint) == (2, "c2")
    assert history.steps_with_batch(10) == {2, 4}
    assert history.steps_with_batch(1) == {4}


def test_what_a_step_trained_is_known_until_it_is_removed(store: Store, ledger: Ledger) -> None:
    fill(store, tasks=1, size=2)
    trained = ["t0.0.0", "t0.0.1", "t0.1.1"]
    commit(ledger, trained=trained, rollouts=["t0.0", "t0.1"])
    commit(ledger, step=2)
    assert StepHistory(store).turns_trained(1) == set(trained)
    assert StepHistory(store).turns_trained(2) == set()
    assert StepHistory(store).count_trained([1, 2, 9]) == {1: 3, 2: 0, 9: 0}


def test_samples_carry_the_rewards_they_are_asked_with(store: Store) -> None:
    fill(store, tasks=1, size=2)
    store.append([Reward(rollout_id="t0.0", value=0.5, turn=0)])
    found = StepHistory(store).samples({"t0.0": 7.0, "gone": 1.0})
    assert list(found) == ["t0.0"]
    assert (found["t0.0"].reward, found["t0.0"].turn_rewards) == (7.0, {0: 0.5})
    assert found["t0.0"].turns == store.rollout_turns("t0.0", raw=False)


def test_splits_and_the_end_of_the_reward_curve(store: Store) -> None:
    history = StepHistory(store)
    assert history.splits() == []
    fill(store, tasks=2, size=2, tags={"split": "train"})
    assert history.splits() == ["train"]
    store.append(rollout_events("h", tags={"split": "held_out"}))
    store.append(rollout_events("o", outcome=None))
    assert history.splits() == ["held_out", "train"], "an open rollout has no reward yet"
    store.append(rollout_events("x"))
    assert history.splits() == ["", "held_out", "train"]
    whole = store.reward_curve({"split": "train"})
    assert len(whole) == 4
    assert store.reward_curve({"split": "train"}, limit=3) == whole[1:]


def test_failed_versions_are_listed_alone(store: Store) -> None:
    for version, state in enumerate(("serving", "failed", "serving", "failed")):
        store.record_version(PolicyVersion(version, None, state))  # type: ignore[arg-type]
    assert store.failed_versions() == [1, 3]


def test_steps_since_one_are_listed_once_and_in_order(store: Store, ledger: Ledger) -> None:
    history = StepHistory(store)
    for number in range(1, 31):
        commit(ledger, step=number)
    assert [step.step for step in history.after(0)] == [*range(1, 31)]
    assert [step.step for step in history.after(28)] == [29, 30]
    assert history.after(30) == []
