"""The gate: candidates wait for their held-out rollouts, and what these say is decided."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from support.store.events import rollout_events
from support.trainer.kept_versions import ServedRun
from tracegrad.store import Store
from tracegrad_trainer.promotion.version_control import GATE_EVERY_LOOKS, TrainingRolledBack

HELD_OUT = {"split": "held_out"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(f"sqlite:///{tmp_path}/store.db")


@pytest.fixture
def run(store: Store, tmp_path: Path) -> ServedRun:
    """Version 0 is served."""
    made = ServedRun(store, tmp_path, gate="held_out", max_rollouts=40, keep=1)
    made.serve(0)
    return made


def look(run: ServedRun) -> str | None:
    """What training waits for, after the gate has looked and was obeyed."""
    for _ in range(2 * GATE_EVERY_LOOKS):
        run.control.look()
    return run.control._hold


def sample(run: ServedRun, version: int, rewards: list[float], kind: str = "") -> None:
    """Held-out rollouts of one version, that end now: by their tags, and every other by mark."""
    for i, reward in enumerate(rewards):
        name = f"{version}-{kind}{i}"
        how: dict[str, Any] = {"held_out": True} if i % 2 else {"tags": HELD_OUT}
        run.store.append(
            rollout_events(name, at=time.time(), reward=reward, version=version, turns=1, **how)
        )


def test_the_first_version_is_promoted_and_gathers_what_to_compare_with(run: ServedRun) -> None:
    held = look(run)
    assert held is not None
    assert "version 0 is promoted, and gathers held-out rollouts" in held
    assert "0 of 40 (split=held_out)" in held
    [decision] = run.store.decisions()
    assert (decision.kind, decision.version, decision.by) == ("promote", 0, "gate:held_out")
    sample(run, 0, [0.0, 1.0] * 20)
    assert look(run) is None, "training goes on, and a candidate can come"


def test_a_candidate_is_waited_for_from_its_push_on(run: ServedRun) -> None:
    """Not from the gate's next look: a step could be made behind it meanwhile."""
    look(run)
    sample(run, 0, [0.0, 1.0] * 20)
    assert look(run) is None
    run.serve(1)
    assert "version 1 is" in str(run.control.hold())


def baseline(run: ServedRun, rewards: list[float]) -> None:
    look(run)
    sample(run, 0, rewards)
    assert look(run) is None


def test_only_an_improvement_promotes(run: ServedRun) -> None:
    baseline(run, [0.0, 0.0, 1.0, 0.0] * 10)
    run.serve(1)
    held = look(run)
    assert held is not None
    assert "version 1 is evaluated: 0 of at most 40" in held
    assert run.states() == {0: "promoted", 1: "candidate"}
    sample(run, 1, [1.0] * 30)
    held = look(run)
    assert run.states() == {0: "served", 1: "promoted"}
    decision = run.store.decisions()[-1]
    assert (decision.kind, decision.version) == ("promote", 1)
    assert decision.reason.startswith("improved on version 0: 1 of 30 held-out rollouts against")
    evaluation = run.store.version_history().records[1].evaluation
    assert evaluation is not None
    assert evaluation["verdict"] == "improved"
    assert evaluation["e_improved"] >= 20
    assert (evaluation["n_candidate"], evaluation["n_baseline"]) == (30, 40)
    # What made it the promoted one is no fair sample of it: the next is compared with others.
    assert held is not None
    assert "version 1 is promoted, and gathers" in held
    assert "0 of 40" in held


def test_a_regression_goes_back_to_the_promoted_one(run: ServedRun) -> None:
    baseline(run, [1.0, 1.0, 0.0, 1.0] * 10)
    run.serve(1)
    sample(run, 1, [0.0] * 30)
    look(run)
    assert run.store.current_version() == 0
    assert run.pusher.loaded[-1] == 0.0
    decision = run.store.decisions()[-1]
    assert (decision.kind, decision.version, decision.training) == ("rollback", 0, "continue")
    assert "version 1 regressed from version 0" in decision.reason
    assert run.states() == {0: "promoted", 1: "rolled_back"}
    with pytest.raises(TrainingRolledBack):
        run.control.check()


@pytest.mark.parametrize(("setting", "promoted"), [("keep", 0), ("promote", 1)])
def test_what_is_inconclusive_for_good_is_kept_or_promoted(
    store: Store, tmp_path: Path, setting: str, promoted: int
) -> None:
    run = ServedRun(store, tmp_path, gate="held_out", max_rollouts=10, inconclusive=setting)
    run.serve(0)
    baseline(run, [0.0, 1.0] * 5)
    run.serve(1)
    sample(run, 1, [0.0, 1.0] * 5)
    held = look(run)
    assert store.version_history().promoted == promoted
    record = store.version_history().records[1]
    assert record.evaluation is not None
    assert record.evaluation["verdict"] == "inconclusive"
    if setting == "keep":
        assert held is None, "training goes on from it, and the next one is compared"
        assert record.state == "served"


def test_rollouts_of_several_versions_are_of_none(run: ServedRun) -> None:
    baseline(run, [0.0, 1.0] * 20)
    run.serve(1)
    mixed = rollout_events("mixed", at=time.time(), tags=HELD_OUT, reward=1.0, version=0, turns=1)
    later = rollout_events("mixed", at=time.time(), tags=HELD_OUT, version=1, turns=2)
    run.store.append([*mixed[:2], *later[2:]])
    held = look(run)
    assert held is not None
    assert "version 1 is evaluated: 0 of at most 40" in held


def test_weights_that_are_not_on_disk_hold_nothing_up(run: ServedRun) -> None:
    baseline(run, [0.0, 1.0] * 20)
    run.no_checkpoint = {1}
    run.serve(1)
    assert look(run) is None
