"""Held-out rollouts, by mark or by tags, are consumed with that reason, and never leased."""

from __future__ import annotations

from typing import Any

import pytest

from support.store.events import make_turn, rollout_events
from support.store.intake_requests import intake_request
from tracegrad.events import Outcome, RolloutFinished, RolloutInferred, RolloutStarted
from tracegrad.store import Group, Ledger, RolloutFilter, Scoring, Store
from tracegrad.store.ledger.intake import Intake
from tracegrad.store.ledger.leases import OverSample
from tracegrad.store.maintenance import examine
from tracegrad.store.read.held_out import VERSION_TAG, RewardWait, held_out_rollouts

HELD_OUT = {"split": "held_out"}


def lease(store: Store, tags: dict[str, str] | None = None) -> list[str]:
    groups = Ledger(store).lease(
        groups=1, group_size=2, owner="me", ttl_s=60, tags=tags, held_out=HELD_OUT
    )
    return sorted(one.rollout_id for group in groups for one in group.rollouts)


def test_they_are_never_leased_and_their_turns_have_the_reason(store: Store) -> None:
    for name in ("a", "b"):
        store.append(rollout_events(name, tags=HELD_OUT))
        store.append(rollout_events(f"train-{name}"))
    store.append(rollout_events("open", tags=HELD_OUT, outcome=None))
    store.append(rollout_events("unrewarded", tags=HELD_OUT, reward=None))
    assert lease(store) == ["train-a", "train-b"]
    counts = store.turn_counts({})
    assert counts.skipped == {"held_out": 4}
    assert counts.captured == counts.trained + 4 + sum(counts.pending.values())
    assert lease(store) == []
    assert store.turn_counts({}).skipped == {"held_out": 4}


def leased(groups: list[Group]) -> set[str]:
    return {one.rollout_id for group in groups for one in group.rollouts}


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("tags", [{}, {"split": "train"}])
@pytest.mark.parametrize("held_out", [None, HELD_OUT])
def test_marked_ones_are_never_leased_whatever_the_settings(
    store: Store, group_size: int, tags: dict[str, str], held_out: dict[str, str] | None
) -> None:
    """They stand among others of their task, and carry the tags that training asks for."""
    train = {"split": "train"}
    for name in ("a", "b"):
        store.append(rollout_events(name, tags=train))
        store.append(rollout_events(f"eval-{name}", at=900.0, tags=train, held_out=True))
    store.append(rollout_events("eval-crash", tags=train, held_out=True, outcome=Outcome.ENV_ERROR))
    ledger = Ledger(store)
    [*peeked] = ledger.preview(groups=9, group_size=group_size, tags=tags).groups
    assert leased(peeked) == {"a", "b"}
    assert ledger.readiness(group_size=group_size, tags=tags).groups == 2 // group_size
    groups = ledger.lease(
        groups=9,
        at_least=1,
        group_size=group_size,
        owner="me",
        ttl_s=60,
        tags=tags,
        held_out=held_out,
        incomplete_after_s=0.0,
        over_sample=OverSample(2),
    )
    assert leased(groups) == {"a", "b"}
    assert {one.reward for group in groups for one in group.rollouts} == {1.0}
    assert store.turn_counts(tags).skipped == {"held_out": 4, "env_error": 2}
    assert all(one.state == "consumed" for one in store.rollouts(RolloutFilter(held_out=True)))
    assert examine(store).ok


def test_marked_ones_are_counted_from_their_opening_on(store: Store) -> None:
    """What else keeps a rollout from training is no news of one that is never trained."""
    opened = RolloutStarted(rollout_id="open", held_out=True)
    store.append([opened, make_turn("open.0", "open")])
    store.append(rollout_events("unrewarded", tags={"split": "val"}, reward=None, held_out=True))
    assert store.turn_counts({"split": "train"}).pending == {"held_out": 3}
    found = Ledger(store).readiness(group_size=2, tags={"split": "train"})
    assert found.states == {"held_out": 2}
    assert [row.state for row in store.rollouts(RolloutFilter(state="held_out"))] == [
        "held_out",
        "held_out",
    ]


def test_the_first_opening_says_it_and_inferred_ones_are_not_marked(store: Store) -> None:
    store.append([make_turn("t", "r")])  # a call may be stored before its rollout's opening
    store.append([RolloutStarted(rollout_id="r", held_out=True)])
    store.append([RolloutStarted(rollout_id="r")])
    store.append([RolloutInferred(rollout_id="live"), make_turn("l", "live")])
    assert {row.rollout_id: row.held_out for row in store.rollouts()} == {"r": True, "live": False}


def test_a_group_is_not_cut_by_marked_ones(store: Store) -> None:
    """One that still runs stays what it is: held out, and not over-sampled."""
    store.append([RolloutStarted(rollout_id="eval", task_id="task", opened_at=1.0, held_out=True)])
    store.append([make_turn("e", "eval")])
    for name in ("a", "b", "c"):
        store.append(rollout_events(name))
    ledger = Ledger(store)
    ledger.lease(groups=1, group_size=2, owner="me", ttl_s=60, over_sample=OverSample(1))
    assert store.turn_counts({}).skipped == {"over_sampled": 2}, "c"
    assert store.turn_counts({}).pending["held_out"] == 1
    store.append([RolloutFinished(rollout_id="eval")])
    assert store.rollout("eval").summary.state == "held_out"


def test_marked_ones_take_no_drivers_place(store: Store) -> None:
    intake = Intake(store)
    intake.request(intake_request(in_flight=2))
    for name in ("e1", "e2"):
        store.append(rollout_events(name, outcome=None, reward=None, held_out=True, turns=0))
        assert not intake.needs_place(name)
    assert len(intake.ask(2).rollout_ids) == 2


def test_a_preview_has_none_of_them(store: Store) -> None:
    for name in ("a", "b"):
        store.append(rollout_events(name, tags=HELD_OUT))
    ledger = Ledger(store)
    assert len(ledger.preview(groups=1, group_size=2).groups) == 1
    assert ledger.preview(groups=1, group_size=2, held_out=HELD_OUT).groups == []
    assert ledger.readiness(group_size=2).groups == 1
    assert ledger.readiness(group_size=2, held_out=HELD_OUT).groups == 0


def test_where_training_selects_others_they_are_left_alone(store: Store) -> None:
    store.append(rollout_events("a", tags=HELD_OUT))
    assert lease(store, {"split": "train"}) == []
    assert store.turn_counts({"split": "train"}).skipped == {}


def test_they_are_read_by_the_versions_that_sampled_them(store: Store) -> None:
    store.append(rollout_events("b", tags=HELD_OUT, at=20, version=2, reward=0.5))
    store.append(rollout_events("a", tags=HELD_OUT, at=10, version=1))
    store.append(rollout_events("later", tags=HELD_OUT, at=10, version=3))
    store.append(rollout_events("train", at=10, version=1))
    store.append(rollout_events("unrewarded", tags=HELD_OUT, version=1, reward=None))
    store.append(rollout_events("marked", at=30, version=2, held_out=True))
    lease(store)
    with store.reading() as connection:
        found = held_out_rollouts(connection, HELD_OUT, [1, 2])
    assert [(one.rollout_id, one.reward, one.versions) for one in found] == [
        ("a", 1.0, frozenset({1})),
        ("b", 0.5, frozenset({2})),
        ("marked", 1.0, frozenset({2})),
        ("unrewarded", None, frozenset({1})),
    ]


def test_why_they_get_no_reward_is_read_with_them(store: Store) -> None:
    none: dict[str, Any] = {"held_out": True, "version": 1, "reward": None}
    store.append(rollout_events("early", **none, at=10))
    store.append(rollout_events("failed", **none, at=20))
    store.append(rollout_events("late", **none, at=40))
    store.append(rollout_events("lost", held_out=True, version=1, outcome=Outcome.INFRA_ERROR))
    silent = {"turns": 0, "tags": {VERSION_TAG: "1"}}
    store.append(rollout_events("silent", **(none | silent)))
    store.append(rollout_events("of another", **(none | silent | {"tags": {VERSION_TAG: "x"}})))
    outcome = Scoring(
        rollout_id="failed", scorer="s", digest="d", turns=2, round=0, state="failed",
        attempts=1, error="e", seconds=0.0, parts=None,
    )  # fmt: skip
    store.record_scorings([outcome], [])

    def lacking(wait: RewardWait | None) -> dict[str, str | None]:
        with store.reading() as connection:
            found = held_out_rollouts(connection, HELD_OUT, [1], wait=wait)
        assert all(one.reward is None and one.versions == {1} for one in found)
        return {one.rollout_id: one.lacks for one in found}

    never = {"failed": "scoring_failed", "lost": "infra_error", "silent": "no_turns"}
    assert lacking(None) == never | {"early": None, "late": None}
    wait = RewardWait(no_reward_before=30)
    assert lacking(wait) == never | {"early": "no_reward", "late": None}
    wait = RewardWait(no_reward_before=30, scorers=["s"])
    assert lacking(wait) == never | {"early": None, "late": None}, "it is not scored yet"
