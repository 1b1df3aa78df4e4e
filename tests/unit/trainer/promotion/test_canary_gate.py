"""The gate with a canary: a candidate is judged by the rollouts of its share of traffic."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from support.store.events import rollout_events
from support.trainer.kept_versions import ServedRun
from tracegrad.store import Store
from tracegrad_trainer.promotion.version_control import GATE_EVERY_LOOKS, TrainingRolledBack


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(f"sqlite:///{tmp_path}/store.db")


@pytest.fixture
def run(store: Store, tmp_path: Path) -> ServedRun:
    """Version 0 is promoted and served by all, 1 is tried."""
    made = ServedRun(store, tmp_path, gate="canary", max_rollouts=40, keep=1)
    made.serve(0)
    assert look(made) is None, "its baseline comes with the next one"
    made.serve(1)
    return made


def look(run: ServedRun) -> str | None:
    """What training waits for, after the gate has looked and was obeyed."""
    for _ in range(2 * GATE_EVERY_LOOKS):
        run.control.look()
    return run.control._hold


def sample(run: ServedRun, version: int, rewards: list[float], **how: Any) -> None:
    """Rollouts of one version, that end now."""
    at = how.pop("at", time.time())
    for i, reward in enumerate(rewards):
        name = f"{version}-{at}-{i}"
        run.store.append(
            rollout_events(name, at=at, reward=reward, version=version, turns=1, **how)
        )


def test_a_candidate_is_served_beside_the_promoted_version(run: ServedRun) -> None:
    assert (run.pusher.version, run.pusher.newest.version) == (0, 1)
    assert run.states() == {0: "promoted", 1: "candidate"}
    assert run.kept() == [0, 1]
    held = look(run)
    assert held is not None
    assert "version 1 is evaluated: 0 of at most 40 rollouts of its share" in held
    assert "promotion.canary_share = 0.1" in held


def test_an_improvement_goes_to_all_engines(run: ServedRun) -> None:
    sample(run, 0, [0.0, 0.0, 1.0, 0.0] * 50)
    sample(run, 1, [1.0] * 30)
    assert look(run) is None
    assert run.states() == {0: "served", 1: "promoted"}
    assert run.pusher.version == 1
    decision = run.store.decisions()[-1]
    assert (decision.kind, decision.version, decision.by) == ("promote", 1, "gate:canary")
    assert decision.outcome == {"version": 1, "seconds": {"load": 0.0}}
    assert decision.reason.startswith("improved on version 0: 1 of 30 rollouts of its share")
    run.serve(2)
    assert (run.pusher.version, run.pusher.newest.version) == (1, 2)


def test_a_regression_is_taken_back_where_it_was_served(run: ServedRun) -> None:
    sample(run, 0, [1.0, 1.0, 0.0, 1.0] * 50)
    sample(run, 1, [0.0] * 30)
    look(run)
    assert (run.pusher.version, run.pusher.newest.version) == (0, 0)
    assert run.states() == {0: "promoted", 1: "rolled_back"}
    with pytest.raises(TrainingRolledBack):
        run.control.check()


def test_what_the_promoted_version_did_before_or_held_out_is_not_compared(run: ServedRun) -> None:
    """Traffic changes: both arms are of the same time."""
    sample(run, 0, [0.0] * 100, at=time.time() - 3600)
    sample(run, 0, [0.0] * 100, held_out=True)
    sample(run, 1, [1.0] * 30)
    held = look(run)
    assert held is not None
    assert "version 1 is evaluated: 30 of at most 40" in held
    assert run.states() == {0: "promoted", 1: "candidate"}


def test_what_the_promoted_version_did_before_the_candidate_came_is_not_compared(
    run: ServedRun,
) -> None:
    history = run.store.version_history()
    between = (history.promoted_at + history.records[1].created_at) / 2
    sample(run, 0, [0.0] * 100, at=between - 1.0)  # a rollout lasts a second
    sample(run, 1, [1.0] * 30)
    assert "version 1 is evaluated: 30 of at most 40" in str(look(run))
    assert run.states() == {0: "promoted", 1: "candidate"}


def test_a_promotion_that_engines_refuse_leaves_the_promoted_version(run: ServedRun) -> None:
    run.pusher.refuses = "not today"
    sample(run, 0, [0.0, 0.0, 1.0, 0.0] * 50)
    sample(run, 1, [1.0] * 30)
    look(run)
    assert run.states()[0] == "promoted"
    assert run.store.decisions()[-1].refused == "not today"


def test_a_run_that_starts_again_serves_the_promoted_version_first(run: ServedRun) -> None:
    control = run.begin_again()
    control._pusher = run.pusher = type(run.pusher)(run.pusher.folder)
    assert control.is_candidate(1)
    assert run.pusher.loaded == [0.0]
    assert run.pusher.version == 0
    run.pusher = type(run.pusher)(run.pusher.folder)
    control._pusher = run.pusher
    assert not control.is_candidate(0), "these are the promoted weights"
    assert run.pusher.loaded == []


def test_without_the_promoted_weights_on_disk_the_next_ones_go_to_all(
    run: ServedRun, caplog: pytest.LogCaptureFixture
) -> None:
    run.control._kept.remove(0)
    run.pusher = type(run.pusher)(run.pusher.folder)
    run.control._pusher = run.pusher
    assert not run.control.is_candidate(1)
    assert "cannot be served beside the next one" in caplog.text


def test_what_somebody_else_promotes_is_the_next_ones_baseline(run: ServedRun) -> None:
    run.decide("pin", 0)
    sample(run, 0, [0.0, 0.0, 1.0, 0.0] * 50)
    sample(run, 1, [1.0] * 30)
    look(run)
    assert run.pusher.version == 1
    assert run.decide("promote", 0).outcome == {"version": 0}
    run.serve(2)
    assert run.pusher.loaded[-2:] == [0.0, 2.0]
    assert (run.pusher.version, run.pusher.newest.version) == (0, 2)
