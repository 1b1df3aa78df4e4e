"""Looking back at steps, and ahead at what a lease would give; on both databases."""

from __future__ import annotations

import time
from typing import Any

from support.store.events import rollout_events
from tracegrad.events import Reward
from tracegrad.store import LeasePreview, Ledger, PolicyVersion, StepHistory, StepRecord, Store


def fill(store: Store, tasks: int, size: int, **more: Any) -> None:
    for task in range(tasks):
        for n in range(size):
            at = 1000.0 + 10 * task + n
            store.append(rollout_events(f"t{task}.{n}", task=f"t{task}", at=at, **more))


def commit(store: Store, step: int, trained: list[str] | None = None, **more: Any) -> None:
    record = StepRecord(step=step, version=step, settings={"large": 1}, **more)
    rollouts = sorted({turn_id.rpartition(".")[0] for turn_id in trained or []})
    Ledger(store).commit_step(record, trained=trained or [], skipped={}, rollouts=rollouts)


def ids(peek: LeasePreview) -> list[list[str]]:
    return [[rollout.rollout_id for rollout in group.rollouts] for group in peek.groups]


def test_a_peek_is_what_a_lease_would_give_and_changes_nothing(store: Store) -> None:
    fill(store, tasks=3, size=2)
    ledger = Ledger(store)
    first = ledger.preview(groups=2, group_size=2)
    assert ids(first) == [["t0.0", "t0.1"], ["t1.0", "t1.1"]]
    assert (first.more, first.incomplete) == (1, [])
    assert ids(ledger.preview(groups=2, group_size=2)) == ids(first)
    assert store.turn_counts().pending == {"waiting": 12}, "nothing is leased"
    assert ledger.leases("t0.0") == []
    leased = ledger.lease(groups=2, group_size=2, owner="me", ttl_s=60)
    assert [group.rollouts for group in leased] == [group.rollouts for group in first.groups]
    assert ids(ledger.preview(groups=2, group_size=2)) == [["t2.0", "t2.1"]], "fewer will do"


def test_a_peek_says_who_waits_for_whom(store: Store) -> None:
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
    assert ids(stale) == [["a0", "a1"]]
    assert [task.task_id for task in stale.incomplete] == ["b"]


def test_a_step_is_found_with_its_batch_and_in_short_without(store: Store) -> None:
    history = StepHistory(store)
    assert (history.count(), history.steps(), history.step(1), history.before(1)) == (
        *(0, [], None),
        None,
    )
    for step in (1, 2, 4):
        batch: dict[str, Any] | None = {"groups": []} if step > 1 else None
        commit(store, step, batch=batch, metrics={"loss": step / 4}, checkpoint=f"c{step}")
    assert history.count() == 3
    assert [step.step for step in history.steps(2)] == [2, 4]
    assert [step.metrics for step in history.steps(2)] == [{"loss": 0.5}, {"loss": 1.0}]
    assert all(not step.settings and step.batch is None for step in history.steps())
    found = history.step(2)
    assert found is not None
    assert (found.batch, found.settings) == ({"groups": []}, {"large": 1})
    before = history.before(4)
    assert before is not None
    assert (before.step, before.checkpoint) == (2, "c2")
    assert history.steps_with_batch(10) == {2, 4}
    assert history.steps_with_batch(1) == {4}


def test_what_a_step_trained_is_known_until_it_is_removed(store: Store) -> None:
    fill(store, tasks=1, size=2)
    commit(store, 1, ["t0.0.0", "t0.0.1", "t0.1.1"])
    commit(store, 2)
    assert StepHistory(store).turns_trained(1) == {"t0.0.0", "t0.0.1", "t0.1.1"}
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


def test_failed_versions_are_told_alone(store: Store) -> None:
    for version, state in enumerate(("serving", "failed", "serving", "failed")):
        store.record_version(PolicyVersion(version, None, state))  # type: ignore[arg-type]
    assert store.failed_versions() == [1, 3]


def test_steps_since_one_are_told_once_and_in_order(store: Store) -> None:
    ledger, history = Ledger(store), StepHistory(store)
    for number in range(1, 31):
        record = StepRecord(step=number, version=number)
        ledger.commit_step(record, trained=[], skipped={}, rollouts=[])
    assert [step.step for step in history.after(0)] == [*range(1, 31)]
    assert [step.step for step in history.after(28)] == [29, 30]
    assert history.after(30) == []
