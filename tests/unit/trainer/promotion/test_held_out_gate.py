"""The gate: candidates wait for their held-out rollouts, and what these say is decided."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from support.store.events import rollout_events
from support.trainer.kept_versions import ServedRun
from tracegrad.events import Outcome, Reward
from tracegrad.store import Scoring, Store
from tracegrad.store.read.held_out import VERSION_TAG
from tracegrad.store.types import COMPOSED_SOURCE
from tracegrad_trainer.promotion.evaluator import gate_of
from tracegrad_trainer.promotion.version_control import GATE_EVERY_LOOKS, TrainingRolledBack
from tracegrad_trainer.rewards.config import RewardSettings

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


def sample(
    run: ServedRun, version: int, rewards: list[float], kind: str = "", ago_s: float = 0.0
) -> None:
    """Held-out rollouts of one version, that end now: by their tags, and every other by mark."""
    for i, reward in enumerate(rewards):
        name, at = f"{version}-{kind}{i}", time.time() - ago_s
        how: dict[str, Any] = {"held_out": True} if i % 2 else {"tags": HELD_OUT}
        run.store.append(
            rollout_events(name, at=at, reward=reward, version=version, turns=1, **how)
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


def test_no_step_is_made_between_a_verdict_and_what_comes_of_it(run: ServedRun) -> None:
    """What is promoted has no rollouts yet to compare the next one with."""
    for version, reward in ((0, 0.0), (1, 1.0)):
        if version:
            run.serve(version)
        sample(run, version, [reward] * 40, "candidate", ago_s=60.0)
        held = [str(run.control.hold())]
        for _ in range(3 * GATE_EVERY_LOOKS):
            run.control.look()
            held.append(str(run.control.hold()))
        assert any(f"version {version} is about to be promoted: " in why for why in held), held
        assert f"version {version} is promoted, and gathers" in held[-1]
        assert "None" not in held
        sample(run, version, [reward] * 40, "baseline")
        assert look(run) is None


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
    sample(run, 1, [1.0] * 30, ago_s=60.0)
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
    assert "with: 0 of 40" in held


def test_no_rollouts_are_made_of_a_version_that_is_judged_and_not_promoted(run: ServedRun) -> None:
    baseline(run, [0.0, 0.0, 1.0, 0.0] * 10)
    run.serve(1)
    assert wanted(run) == 1
    sample(run, 1, [1.0] * 30)
    run.pusher.refuses = "an engine does not take it"
    look(run)
    assert run.store.version_history().promoted == 0
    assert run.store.version_history().records[1].evaluation is not None
    assert wanted(run) is None, "although ten more could be"


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


# Rollouts that get no reward


COMPOSED = RewardSettings.model_validate(
    {"weights": {"reward": 1, "resolved": 1}, "commands": {"resolved": "true"}}
)


@pytest.fixture
def composed(store: Store, tmp_path: Path) -> ServedRun:
    """Version 0 is served; rewards are sums, of which a scorer gives a part."""
    made = ServedRun(store, tmp_path, COMPOSED, gate="held_out", max_rollouts=10)
    made.serve(0)
    look(made)
    return made


def wanted(run: ServedRun) -> int | None:
    """The version that the evaluator makes rollouts of."""
    resolved = {
        "promotion": run.promotion.model_dump(mode="json"),
        "rewards": run.rewards.model_dump(mode="json"),
        "data": {},
    }
    return gate_of(resolved, run.store).gathers(run.store.version_history())


def ended(run: ServedRun, version: int, count: int, kind: str, state: Any = None) -> list[str]:
    """Held-out rollouts with a reward of their own, and how the scorer ended with them: `scored`
    (then they have a sum), `failed`, or it did not."""
    names = [f"{version}-{kind}{i}" for i in range(count)]
    for name in names:
        events = rollout_events(name, at=time.time(), version=version, turns=1, held_out=True)
        run.store.append(events)
        if state is not None:
            outcome = Scoring(
                rollout_id=name, scorer="resolved", digest="d", turns=1, round=0, state=state,
                attempts=1, error=None, seconds=0.0, parts={"resolved": 1.0},
            )  # fmt: skip
            sums = [Reward(rollout_id=name, value=2.0, source=COMPOSED_SOURCE)]
            assert run.store.record_scorings([outcome], sums if state == "scored" else [])
    return names


def test_the_evaluator_and_the_gate_count_the_same_rewards(composed: ServedRun) -> None:
    """What has a part of its sum alone counts for neither: one would stop, the other wait."""
    ended(composed, 0, 9, "whole", "scored")
    ended(composed, 0, 1, "lacks one", "failed")
    held = look(composed)
    assert held is not None
    assert "9 of 10 (split=held_out); 1 more get no reward: 1 scoring_failed" in held
    assert wanted(composed) == 0, "another takes its place"
    ended(composed, 0, 1, "another", "scored")
    assert (look(composed), wanted(composed)) == (None, None)


def test_nobody_waits_for_ever_for_rewards_that_do_not_come(composed: ServedRun) -> None:
    ended(composed, 0, 19, "failed", "failed")
    assert "0 of 10" in (look(composed) or "")
    assert wanted(composed) == 0
    ended(composed, 0, 1, "last", "failed")
    assert (look(composed), wanted(composed)) == (None, None)
    composed.serve(1)
    assert "version 1 is evaluated: 0 of at most 10" in (look(composed) or "")
    ended(composed, 1, 20, "failed", "failed")
    assert (look(composed), wanted(composed)) == (None, None)
    evaluation = composed.store.version_history().records[1].evaluation
    assert evaluation is not None
    assert evaluation["verdict"] == "inconclusive"
    assert evaluation["lacking"] == {"scoring_failed": 20}


def test_what_nothing_is_known_of_is_not_promoted(store: Store, tmp_path: Path) -> None:
    more: dict[str, Any] = {"gate": "held_out", "max_rollouts": 2, "inconclusive": "promote"}
    run = ServedRun(store, tmp_path, COMPOSED, **more)
    run.serve(0)
    look(run)
    ended(run, 0, 2, "whole", "scored")
    run.serve(1)
    ended(run, 1, 4, "failed", "failed")
    assert look(run) is None
    assert store.version_history().promoted == 0


def test_the_evaluator_does_not_run_ahead_of_scorers_that_are_behind(composed: ServedRun) -> None:
    names = ended(composed, 0, 20, "not yet")
    assert "0 of 10" in (look(composed) or ""), "they may all be scored yet"
    assert wanted(composed) is None
    for name in names[:10]:
        composed.store.append([Reward(rollout_id=name, value=2.0, source=COMPOSED_SOURCE)])
    assert look(composed) is None


@pytest.mark.parametrize(
    ("rollout", "reason"),
    [
        ({"outcome": Outcome.INFRA_ERROR}, "infra_error"),
        ({"turns": 0, "tags": {VERSION_TAG: "1"}}, "no_turns"),
        ({"reward": None}, "no_reward"),  # since long
    ],
)
def test_why_a_rollout_gets_no_reward(run: ServedRun, rollout: Any, reason: str) -> None:
    baseline(run, [0.0, 1.0] * 20)
    run.serve(1)
    given = {"at": 1000.0, "turns": 1, "version": 1, "held_out": True} | rollout
    run.store.append(rollout_events("r", **given))
    held = look(run) or ""
    assert held.startswith("version 1 is evaluated: 0 of at most 40")
    assert held.endswith(f"; 1 more get no reward: 1 {reason}")


def test_a_reward_that_may_come_yet_is_waited_for(run: ServedRun) -> None:
    baseline(run, [0.0, 1.0] * 20)
    run.serve(1)
    given: dict[str, Any] = {"turns": 1, "version": 1, "held_out": True, "reward": None}
    run.store.append(rollout_events("r", at=time.time(), **given))
    assert (look(run) or "").endswith("0 of at most 40 held-out rollouts (split=held_out)")
