"""A turn is trained at most once, and every turn is counted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from support.store.events import make_turn, rollout_events
from support.store.ledger_fixtures import FakeClock, commit, fill, ids, lease, turn_ids
from support.store.ledger_fixtures import fake_clock as fake_clock
from support.store.ledger_fixtures import ledger as ledger
from tracegrad.events import Outcome
from tracegrad.store import (
    AlreadyTrained,
    Ledger,
    LedgerError,
    StepRecord,
    Store,
    TurnCounts,
    lease_by_rollout,
)


def test_a_step_commits_with_its_turns(store: Store, ledger: Ledger) -> None:
    fill(store, tasks=2, size=2)
    used, dropped = lease(ledger, groups=2)
    step = StepRecord(
        step=7, version=8, settings={"lr": 1e-5}, metrics={"loss": 0.5}, checkpoint="ckpt/7"
    )
    skipped = dict.fromkeys(turn_ids(dropped), "equal_rewards")
    commit(ledger, [used, dropped], trained=turn_ids(used), skipped=skipped, **asdict(step))
    assert ledger.last_step() == step
    assert store.turn_counts() == TurnCounts(8, 4, {"equal_rewards": 4}, {})
    detail = store.rollout("t0.0")
    assert {fate.step for fate in detail.dispositions.values()} == {7}
    row = detail.summary
    assert (row.state, row.consumed_step, row.trained_turns) == ("consumed", 7, 2)
    assert lease(ledger) == []


def test_a_turn_is_trained_once_and_a_second_step_leaves_no_trace(
    store: Store, ledger: Ledger, fake_clock: FakeClock
) -> None:
    fill(store, tasks=2, size=2)
    [slow] = lease(ledger, ttl_s=5)
    fake_clock.advance(6)
    [quick] = lease(ledger)
    assert ids([slow]) == ids([quick]), "the slow trainer outlived its lease"
    names = [r.rollout_id for r in quick.rollouts]
    commit(ledger, [quick])
    [other] = lease(ledger)
    before = (store.turn_counts(), store.rollouts(), ledger.steps())
    with pytest.raises(AlreadyTrained, match=r"turn t0\.\d\.\d was trained by step 1 already"):
        commit(ledger, [other, slow], step=2)
    assert (store.turn_counts(), store.rollouts(), ledger.steps()) == before
    with pytest.raises(AlreadyTrained, match="trained by step 1"):
        ledger.commit_skipped({turn_ids(slow)[0]: "stale"}, names)


def test_a_step_that_contradicts_itself_is_refused(store: Store, ledger: Ledger) -> None:
    fill(store, tasks=1, size=2)
    good: dict[str, Any] = {"trained": ["t0.0.0"], "rollouts": ["t0.0", "t0.1"]}
    for more, message in (
        ({"skipped": {"t0.0.0": "x"}}, "both trained and skipped"),
        ({"trained": ["nobody"]}, "a turn that is not stored"),
        ({"rollouts": ["t0.0", "t0.1", "nobody"]}, "1 of the step's rollouts"),
    ):
        with pytest.raises(LedgerError, match=message):
            commit(ledger, **(good | more))
    assert ledger.last_step() is None
    assert store.turn_counts().pending == {"waiting": 4}
    commit(ledger, **good)
    with pytest.raises(LedgerError, match="step 1 is in the ledger already"):
        commit(ledger)


def test_trained_turns_keep_their_advantage(store: Store, ledger: Ledger) -> None:
    fill(store, tasks=1, size=2)
    [group] = lease(ledger)
    first, second, *rest = turn_ids(group)
    kept = {"trained": [first, second], "skipped": dict.fromkeys(rest, "stale")}
    commit(ledger, [group], **kept, advantages={first: -0.75, rest[0]: 2.0})
    found = {
        name: each.advantage
        for rollout in group.rollouts
        for name, each in store.rollout(rollout.rollout_id).dispositions.items()
    }
    assert found == {first: -0.75, second: None} | dict.fromkeys(rest)


def test_turns_that_come_late_are_counted(store: Store, ledger: Ledger) -> None:
    fill(store, tasks=1, size=2)
    [group] = lease(ledger)
    store.append([make_turn("during", "t0.0")])
    commit(ledger, [group])
    store.append([make_turn("after", "t0.1")])
    assert store.turn_counts() == TurnCounts(6, 4, {"late": 2}, {})


def test_the_counts_always_add_up(store: Store, ledger: Ledger) -> None:
    train = {"split": "train"}
    fill(store, tasks=3, size=2, tags=train)
    store.append(rollout_events("o", tags=train, outcome=None, turns=1))
    store.append(rollout_events("n", tags=train, reward=None, turns=3))
    store.append(rollout_events("h", tags={"split": "held_out"}, turns=5))
    store.append(rollout_events("e", tags=train, outcome=Outcome.ENV_ERROR, turns=1))
    first = lease(ledger, tags=train)
    *trained, skipped = turn_ids(first[0])
    commit(ledger, first, trained=trained, skipped={skipped: "greedy"})
    lease(ledger, tags=train)
    counts = store.turn_counts(train)
    assert counts == TurnCounts(
        captured=22,
        trained=3,
        skipped={"greedy": 1, "env_error": 1},
        pending={"open": 1, "no_reward": 3, "not_selected": 5, "leased": 4, "waiting": 4},
    )
    assert counts.captured == counts.trained + sum(counts.skipped.values()) + sum(
        counts.pending.values()
    )


def test_skipped_groups_need_no_step(store: Store, ledger: Ledger) -> None:
    fill(store, tasks=1, size=2)
    [group] = lease(ledger)
    fates = dict.fromkeys(turn_ids(group), "equal_rewards")
    ledger.commit_skipped(fates, ids([group])[0], lease_by_rollout([group]))
    assert ledger.last_step() is None
    assert store.turn_counts() == TurnCounts(4, 0, {"equal_rewards": 4}, {})


def test_the_last_steps_come_in_order_with_what_they_were_made_of(ledger: Ledger) -> None:
    for number in (1, 2, 3):
        commit(ledger, step=number, batch={"groups": [], "ranks": 2} if number == 2 else None)
    assert [step.step for step in ledger.steps(2)] == [2, 3]
    assert [step.step for step in ledger.steps()] == [1, 2, 3]
    assert [step.batch for step in ledger.steps()] == [None, {"groups": [], "ranks": 2}, None]
