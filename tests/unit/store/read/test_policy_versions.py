"""Policy versions: what became of each, and the rewards by version."""

from __future__ import annotations

from support.store.events import rollout_events
from tracegrad.events import Outcome
from tracegrad.store import PolicyVersion, Store


def test_versions_are_kept_by_number(store: Store) -> None:
    assert store.current_version() is None
    store.record_version(PolicyVersion(0, None, "serving", 1.0))
    store.record_version(PolicyVersion(1, 1, "pushing", 2.0))
    assert store.current_version() == 0
    done = PolicyVersion(1, 1, "serving", 3.0, {"push_s": 0.5})
    store.record_version(done)
    store.record_version(PolicyVersion(2, 2, "failed", 4.0))
    assert store.current_version() == 1
    assert [version.state for version in store.versions()] == ["serving", "serving", "failed"]
    assert store.versions()[1] == done


def test_all_that_became_of_a_version_is_kept_in_order(store: Store) -> None:
    events = [
        PolicyVersion(1, 1, "pushing", 2.0),
        PolicyVersion(1, 1, "failed", 5.0, {"why": "it does not agree"}),
        PolicyVersion(1, 1, "pushing", 4.0),  # clocks may go back
        PolicyVersion(1, 2, "serving", 6.0),
    ]
    store.record_version(PolicyVersion(0, None, "serving", 1.0))
    for event in events:
        store.record_version(event)
    assert store.version_events(1) == events
    assert store.versions()[1] == events[-1]
    assert len(store.version_events(0)) == 1
    assert store.version_events(7) == []


def test_the_reward_curve_shows_scored_rollouts_by_finish(store: Store) -> None:
    store.append(rollout_events("b", at=20, reward=0.5, version=3, tags={"split": "train"}))
    store.append(rollout_events("a", at=10, reward=0.25, version=2, tags={"split": "train"}))
    store.append(rollout_events("x", at=5, reward=1.0, outcome=Outcome.INFRA_ERROR))
    store.append(rollout_events("y", at=6, reward=1.0, turns=0))
    assert store.reward_curve({"split": "train"}) == [(11, 0.25, 2), (21, 0.5, 3)]
    assert store.reward_curve() == [(7, 1.0, None), (11, 0.25, 2), (21, 0.5, 3)]
