"""Guards in front of a batch: what drifted is not trained, and who asked for it is told so."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.store.events import make_turn, rollout_events
from tracegrad.events import Event
from tracegrad.store import Ledger, Store
from tracegrad.store.types import Group
from tracegrad_trainer.guards import GuardSettings
from tracegrad_trainer.rl.drift_watch import DriftWatch

ASKS, ANSWERS = "Shall I?", "Done."


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path}/store.db") as opened:
        yield opened


def groups_of(store: Store, reply: str, *, first: int, groups: int, version: int) -> list[Group]:
    """Leased ones of four rollouts, each of which ends with `reply`."""
    events: list[Event] = []
    for number in range(first, first + groups):
        for attempt in range(4):
            name = f"{number}-{attempt}"
            turn = make_turn(
                f"t{name}",
                name,
                version=version,
                request={"model": "m", "messages": [{"role": "user", "content": "Rename x."}]},
                response={"choices": [{"message": {"role": "assistant", "content": reply}}]},
            )
            whole = rollout_events(name, task=f"task {number}", reward=attempt % 2, turns=0)
            events += [whole[0], turn, *whole[1:]]
    store.append(events)
    leased = Ledger(store).lease(groups=groups, group_size=4, owner="me", ttl_s=60)
    assert len(leased) == groups
    return leased


def drifted(store: Store, watch: DriftWatch) -> bool:
    """After twenty groups that answered, of version 1, twenty that ask, of version 2."""
    assert not watch.stops(groups_of(store, ANSWERS, first=0, groups=20, version=1))
    return watch.stops(groups_of(store, ASKS, first=20, groups=20, version=2))


def test_a_warning_is_a_line_in_the_log(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    watch = DriftWatch(GuardSettings(baseline=16), store)
    assert not drifted(store, watch)
    assert "drift guard: questions: 100% of rollouts of the last" in caplog.text
    assert store.decisions() == []
    assert watch.take_stats()["drift_alarms"] == 1
    assert watch.take_stats()["drift_alarms"] == 0


def test_training_is_paused(store: Store) -> None:
    assert drifted(store, DriftWatch(GuardSettings(baseline=16, action="pause"), store))
    [pause] = store.decisions()
    assert (pause.kind, pause.by) == ("pause", "guard:questions")
    assert "since version 2, against 0% before" in pause.reason


def test_the_last_good_version_is_asked_for(store: Store) -> None:
    assert drifted(store, DriftWatch(GuardSettings(baseline=16, action="rollback"), store))
    pause, rollback = store.decisions()
    assert pause.kind == "pause"
    assert (rollback.kind, rollback.version, rollback.training) == ("rollback", 1, "pause")


def test_steps_own_figures(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    watch = DriftWatch(GuardSettings(action="pause", min_entropy=0.1), store)
    watch.check_step({"entropy": 0.2})
    assert store.decisions() == []
    watch.check_step({"entropy": 0.05})
    assert [decision.by for decision in store.decisions()] == ["guard:entropy"]


def test_what_was_seen_is_kept_with_a_checkpoint(store: Store) -> None:
    settings = GuardSettings(baseline=16, action="pause")
    first, second = DriftWatch(settings, store), DriftWatch(settings, store)
    assert not first.stops(groups_of(store, ANSWERS, first=0, groups=20, version=1))
    second.restore(first.state())
    assert second.stops(groups_of(store, ASKS, first=20, groups=20, version=2))
