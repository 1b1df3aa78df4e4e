"""The ledger's side of training: where it goes on from, what a batch is made of, what is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.store.events import make_turn, rollout_events
from support.trainer.prepared_run import fill
from tracegrad.events import Event, Outcome, Reward
from tracegrad.store import Ledger, PolicyVersion, Scoring, StepRecord, Store
from tracegrad.store.checkpoint_manifest import manifest_digest
from tracegrad_trainer.config.loading import load_settings
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import CheckpointError
from tracegrad_trainer.engine.checkpoint.manifest import write_manifest
from tracegrad_trainer.rl.coordinator import Coordinator, LeasedBatch, RolloutSupply
from tracegrad_trainer.rl.step_inputs import StepInputs

Make = Callable[..., Coordinator]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A coordinator on the store of `tmp_path`; settings as `batches__groups=2`."""
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).touch()
    made: list[Coordinator] = []

    def coordinator(supply: RolloutSupply | None = None, **changes: Any) -> Coordinator:
        sets = {
            "model": tmp_path,
            "state_dir": tmp_path,
            "batches__groups": 2,
            "batches__group_size": 3,
            "batches__max_staleness": "null",
            **changes,
        }
        settings = load_settings(None, [f"{k.replace('__', '.')}={v}" for k, v in sets.items()])
        store = Store.open(settings.proxy.store)
        made.append(Coordinator(settings, store, stopping=lambda: False, supply=supply))
        return made[-1]

    yield coordinator
    for one in made:
        one.leases.close()
        one.store.close()


@pytest.fixture
def coordinator(make: Make) -> Coordinator:
    return make()


OFFLINE = RolloutSupply(is_open=False)


def checkpoint(settings: TrainerSettings, step: int) -> Path:
    folder = settings.checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_text("table of contents")
    write_manifest(folder, {"step": step}, {})
    return folder


def commit(coordinator: Coordinator, step: int, version: int) -> str:
    folder = str(checkpoint(coordinator.settings, step))
    record = StepRecord(
        step=step,
        version=version,
        checkpoint=folder,
        run_id=coordinator.run_id,
        manifest_digest=manifest_digest(Path(folder)),
    )
    coordinator.ledger.commit_step(record, trained=[], skipped={}, rollouts=[])
    return folder


def began(coordinator: Coordinator) -> tuple[int, int, str | None]:
    """Step, version and checkpoint that it would go on from."""
    point = coordinator.resume_point()
    return point.step, point.version, None if point.weights is None else str(point.weights.folder)


def groups_of(batch: LeasedBatch | None) -> list[str]:
    assert batch is not None
    return [group.group_id for group in batch.groups]


# Where training goes on


def test_a_new_store_begins_with_the_model_folder(coordinator: Coordinator) -> None:
    assert began(coordinator) == (0, 0, None)


def test_the_last_committed_step_is_gone_on_from(coordinator: Coordinator) -> None:
    commit(coordinator, 1, 1)
    folder = commit(coordinator, 2, 2)
    coordinator.store.record_version(PolicyVersion(2, 2, "serving"))
    assert began(coordinator) == (2, 2, folder)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_failed_versions_number_is_not_served_again(coordinator: Coordinator, steps: int) -> None:
    """Tokens sampled before its push was undone carry it, and must stay untrainable."""
    for step in range(1, steps + 1):
        commit(coordinator, step, step)
    coordinator.store.record_version(PolicyVersion(steps, steps or None, "failed"))
    assert coordinator.resume_point().version == steps + 1


@pytest.mark.parametrize("state", ["pushing", "serving"])
def test_the_number_of_a_version_whose_step_was_lost_is_not_used_again(
    coordinator: Coordinator, state: Any
) -> None:
    """It was pushed while its checkpoint was written, and the trainer was killed."""
    commit(coordinator, 1, 1)
    coordinator.store.record_version(PolicyVersion(2, 2, state))
    assert began(coordinator) == (1, 3, str(coordinator.settings.checkpoints / "step-00000001"))


def test_a_state_folder_that_was_moved_has_its_checkpoints_with_it(
    coordinator: Coordinator,
) -> None:
    here = checkpoint(coordinator.settings, 1)
    record = StepRecord(step=1, version=1, checkpoint=f"/elsewhere/checkpoints/{here.name}")
    coordinator.ledger.commit_step(record, trained=[], skipped={}, rollouts=[])
    assert began(coordinator) == (1, 1, str(here))


def test_a_checkpoint_that_is_not_whole_is_named_with_the_older_one_that_is(
    coordinator: Coordinator, make: Make
) -> None:
    commit(coordinator, 1, 1)
    broken = Path(commit(coordinator, 2, 2)) / ".metadata"
    broken.unlink()
    with pytest.raises(CheckpointError) as error:
        coordinator.resume_point()
    assert f"{broken} is missing" in str(error.value)
    assert "checkpoint.resume_from=1" in str(error.value)
    # The number of the step goes on; weights of step 2 had version 2.
    older = make(checkpoint__resume_from=1)
    first = str(coordinator.settings.checkpoints / "step-00000001")
    assert began(older) == (2, 3, first)


def test_groups_of_a_killed_trainer_are_its_own_again(make: Make) -> None:
    killed = make(supply=OFFLINE)
    fill(killed.settings.proxy.store, groups=2)
    assert groups_of(killed.next_batch(0)) == ["task 000", "task 001"]
    again = make(supply=OFFLINE)
    assert again.next_batch(0) is None
    again.resume_point()
    assert groups_of(again.next_batch(0)) == ["task 000", "task 001"]


# What a batch is made of


def test_a_store_that_does_not_grow_gives_what_it_has(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make(supply=OFFLINE)
    fill(coordinator.settings.proxy.store, groups=1)
    assert groups_of(coordinator.next_batch(0)) == ["task 000"]
    slept: list[float] = []
    monkeypatch.setattr("tracegrad_trainer.rl.coordinator.time.sleep", slept.append)
    assert coordinator.next_batch(0) is None
    assert slept == [], "nobody is waited for"


def test_a_store_that_grows_is_waited_for_until_the_batch_is_whole(make: Make) -> None:
    coordinator = make(supply=RolloutSupply(patience_s=0.3))
    fill(coordinator.settings.proxy.store, groups=1)
    assert coordinator.next_batch(0) is None
    fill(coordinator.settings.proxy.store, groups=1, first=1)
    assert groups_of(coordinator.next_batch(0)) == ["task 000", "task 001"]


def test_a_batch_of_nothing_but_equal_rewards_is_consumed_and_costs_no_step(make: Make) -> None:
    coordinator = make(supply=OFFLINE)
    turns = fill(coordinator.settings.proxy.store, groups=2, first=2)
    assert coordinator.next_batch(0) is None
    counts = coordinator.store.turn_counts()
    assert counts.skipped == {"equal_reward": len(turns)}
    assert f"{len(turns)} skipped ({len(turns)} equal_reward)" in coordinator.explain_no_batch()


def test_refilled_groups_are_replaced_within_the_same_batch(make: Make) -> None:
    coordinator = make(supply=OFFLINE, data__refill="true")
    fill(coordinator.settings.proxy.store, groups=6)
    assert groups_of(coordinator.next_batch(0)) == ["task 000", "task 001"]
    batch = coordinator.next_batch(0)
    assert groups_of(batch) == ["task 002", "task 003", "task 004", "task 005"]
    assert batch is not None
    assert {row.group_id for row in batch.selection.rows} == {"task 004", "task 005"}
    assert set(batch.selection.skipped.values()) == {"equal_reward"}
    assert {group.group_id for group in batch.groups} == {
        f"task {number:03d}" for number in (2, 3, 4, 5)
    }, "the equal ones are the step's to record"


def test_a_refill_that_finds_no_more_goes_on_with_what_there_is(make: Make) -> None:
    coordinator = make(supply=OFFLINE, data__refill="true")
    fill(coordinator.settings.proxy.store, groups=3, first=2)
    assert groups_of(coordinator.next_batch(0)) == ["task 002", "task 003", "task 004"]


def test_a_refill_that_waits_keeps_what_it_has(make: Make) -> None:
    coordinator = make(supply=RolloutSupply(patience_s=0.3), data__refill="true")
    fill(coordinator.settings.proxy.store, groups=3, first=2)
    assert coordinator.next_batch(0) is None
    fill(coordinator.settings.proxy.store, groups=1, first=5)
    assert groups_of(coordinator.next_batch(0)) == [f"task {n:03d}" for n in (2, 3, 4, 5)]


@pytest.mark.parametrize(("preset", "refills"), [("dapo", True), ("grpo", False)])
def test_dapo_refills_unless_it_is_set_otherwise(make: Make, preset: str, refills: bool) -> None:
    assert make(objective__preset=preset).settings.refills == refills
    changed = make(objective__preset=preset, data__refill=str(not refills).lower())
    assert changed.settings.refills != refills


def test_tokens_beyond_the_models_vocabulary_are_not_trained(make: Make) -> None:
    coordinator = make(supply=OFFLINE)
    coordinator.vocabulary = 10
    fill(coordinator.settings.proxy.store, groups=2)
    assert coordinator.next_batch(0) is None


# What is remembered, recorded, and given back


def test_only_a_step_moves_what_advantages_remember(make: Make) -> None:
    coordinator = make(
        supply=OFFLINE, objective__advantage="running", batches__drop_equal_reward="true"
    )
    fill(coordinator.settings.proxy.store, groups=4)
    first = coordinator.next_batch(0)
    assert first is not None
    assert first.memory_before == {}
    assert coordinator.memory != {}
    coordinator.discard_batch(first, "non_finite_step")
    assert coordinator.memory == {}
    assert coordinator.next_batch(0) is None, "two groups of equal rewards"
    assert coordinator.memory == {}


def test_a_step_records_what_it_was_made_of(make: Make) -> None:
    coordinator = make(supply=OFFLINE)
    fill(coordinator.settings.proxy.store, groups=2)
    coordinator.store.record_version(PolicyVersion(7, None, "failed"))
    batch = coordinator.next_batch(9)
    assert batch is not None
    made = coordinator.record(
        batch, step=1, version=10, metrics={"loss": 0.5}, dropped_rows=[1], weights=0
    )
    coordinator.commit([made], batch.groups)
    step = Ledger(coordinator.store).last_step()
    assert step is not None
    record = StepInputs.model_validate(step.batch)
    assert record.version == 9
    assert record.failed_versions == [7]
    assert record.dropped_rows == [1]
    assert [group.group_id for group in record.groups] == ["task 000", "task 001"]
    seen = {one.rollout_id: one for group in record.groups for one in group.rollouts}
    for group in batch.groups:
        for rollout in group.rollouts:
            assert seen[rollout.rollout_id].reward == rollout.reward
            assert seen[rollout.rollout_id].turns == len(rollout.turns)
    lost = batch.selection.rows[1].kept_turn_ids
    fates = coordinator.store.rollout(batch.selection.rows[1].rollout_id).dispositions
    assert {fates[turn].skip_reason for turn in lost} == {"non_finite"}
    assert {fates[turn].advantage for turn in lost} == {None}
    row = batch.selection.rows[0]
    [given] = {*row.advantage[row.keep].tolist()}
    kept = coordinator.store.rollout(row.rollout_id).dispositions
    [advantage] = {kept[turn].advantage for turn in row.kept_turn_ids}
    assert advantage == pytest.approx(given)  # float32 in rows


def test_advantages_of_tokens_are_no_turns(make: Make) -> None:
    coordinator = make(supply=OFFLINE, objective__preset="ppo")
    fill(coordinator.settings.proxy.store, groups=2)
    batch = coordinator.next_batch(0)
    assert batch is not None
    made = coordinator.record(batch, step=1, version=1, metrics={}, dropped_rows=[], weights=0)
    assert made.trained
    assert made.advantages == {}


def test_what_is_released_is_leased_again_at_once(make: Make) -> None:
    coordinator = make(supply=OFFLINE)
    fill(coordinator.settings.proxy.store, groups=2)
    batch = coordinator.next_batch(0)
    coordinator.release(batch.groups)
    other = make(supply=OFFLINE)
    other.owner = "another"
    assert groups_of(other.next_batch(0)) == groups_of(batch)


# Judges


def by_length(group: Any) -> list[float]:
    """The longest rollout wins."""
    by_length.asked += 1  # type: ignore[attr-defined]
    return [float(sum(len(turn.completion_token_ids) for turn in r.turns)) for r in group.rollouts]


def test_a_judges_rewards_are_stored_and_used(make: Make) -> None:
    by_length.asked = 0  # type: ignore[attr-defined]
    judged = {"objective__judge": f"{__name__}:by_length"}
    coordinator = make(supply=OFFLINE, **judged)
    fill(coordinator.settings.proxy.store, groups=2)
    batch = coordinator.next_batch(0)
    assert batch is not None
    for group in batch.groups:
        assert [r.reward for r in group.rollouts] == by_length(group)
        for rollout in group.rollouts:
            last = coordinator.store.rewards(rollout.rollout_id)[-1]
            assert (last.value, last.source) == (rollout.reward, "judge")
            assert last.label == f"{__name__}:by_length"
    # A trainer that was killed before its step does not ask again: answers may differ.
    asked = by_length.asked  # type: ignore[attr-defined]
    again = make(supply=OFFLINE, **judged)
    again.resume_point()
    repeated = again.next_batch(0)
    assert repeated is not None
    assert [r.reward for g in repeated.groups for r in g.rollouts] == [
        r.reward for g in batch.groups for r in g.rollouts
    ]
    assert by_length.asked == asked  # type: ignore[attr-defined]


def test_a_judge_that_is_not_there_is_one_line(make: Make) -> None:
    with pytest.raises(ValueError, match="judge 'nowhere:judge' cannot be imported"):
        make(objective__judge="nowhere:judge")


# Crashed attempts that nobody scored


def crashed(name: str, *rewards: Reward) -> list[Event]:
    ended = rollout_events(name, reward=None, outcome=Outcome.AGENT_ERROR, at=time.time() - 1)
    return [*ended, *rewards]


def rewards_of(coordinator: Coordinator, name: str) -> list[float | None]:
    return [event.value for event in coordinator.store.rewards(name)]


def test_a_crash_that_nobody_scored_has_the_reward_of_its_rule_once(make: Make) -> None:
    coordinator = make(OFFLINE, rewards__agent_error=-0.5)
    store = coordinator.store
    store.append([event for name in ("a", "b") for event in crashed(name)])
    store.append(crashed("scored", Reward(rollout_id="scored", value=0.25)))
    withdrawn = [Reward(rollout_id="back", value=value) for value in (1.0, None)]
    store.append(crashed("back", *withdrawn))
    batch = coordinator.next_batch(0)
    assert batch is not None
    given = {each.rollout_id: each.reward for each in batch.groups[0].rollouts}
    assert given == {"a": -0.5, "b": -0.5, "scored": 0.25}
    [event] = store.rewards("a")
    assert (event.source, event.label) == ("rule", "rewards.agent_error")
    assert rewards_of(coordinator, "back") == [1.0, None], "it stays unknown"
    assert coordinator.crash_reward is not None
    coordinator.crash_reward._asked = -1e9
    coordinator.crash_reward.apply(0.0)
    assert rewards_of(coordinator, "a") == [-0.5]


def test_a_reward_that_comes_after_the_rules_counts(make: Make) -> None:
    coordinator = make(OFFLINE, rewards__agent_error=0, batches__group_size=2)
    coordinator.store.append([event for name in ("a", "b") for event in crashed(name)])
    assert coordinator.crash_reward is not None
    coordinator.crash_reward.apply(0.0)
    coordinator.store.append([Reward(rollout_id="a", value=0.75)])
    batch = coordinator.next_batch(0)
    assert batch is not None
    given = {each.rollout_id: each.reward for each in batch.groups[0].rollouts}
    assert given == {"a": 0.75, "b": 0.0}


def test_the_rule_waits_for_those_who_score(make: Make) -> None:
    coordinator = make(rewards__agent_error=0)
    coordinator.store.append(crashed("a"))
    coordinator._lease()
    assert rewards_of(coordinator, "a") == [], "data.incomplete_after_s are not over"


def test_the_rule_holds_while_training_is_held(make: Make) -> None:
    """By a gate that waits for the rewards of held-out rollouts, of which some crashed."""
    coordinator = make(rewards__agent_error=0)
    ended = rollout_events("a", reward=None, outcome=Outcome.AGENT_ERROR, held_out=True)
    coordinator.store.append(ended)  # since long
    coordinator.release_held()
    assert rewards_of(coordinator, "a") == [0.0]


def test_without_the_rule_it_is_unknown(make: Make) -> None:
    coordinator = make(OFFLINE)
    coordinator.store.append(crashed("a"))
    assert coordinator.next_batch(0) is None
    assert rewards_of(coordinator, "a") == []


# Traffic that nobody opened


def calls(name: str, age_s: float) -> list[Event]:
    turn = make_turn(f"{name}.0", name, created_at=time.time() - age_s)
    return [turn, Reward(rollout_id=name, value=1.0)]


IDLE: dict[str, Any] = {
    "data__idle_s": 600,
    "batches__group_size": 1,
    "objective__advantage": "running",
}


def test_what_is_idle_is_closed_before_it_is_leased(make: Make) -> None:
    coordinator = make(OFFLINE, **IDLE)
    coordinator.store.append([*calls("old", 1000), *calls("new", 0)])
    batch = coordinator.next_batch(0)
    assert batch is not None
    assert batch.selection.rollouts == ["old"]
    assert coordinator.store.rollout("new").summary.state == "open"


def test_while_rollouts_come_the_store_is_asked_once_a_second(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make(**IDLE)
    asked: list[float] = []

    def close_idle(idle_s: float, **_: Any) -> list[str]:
        asked.append(idle_s)
        return []

    monkeypatch.setattr(coordinator.ledger, "close_idle", close_idle)
    now = [0.0]
    monkeypatch.setattr("tracegrad_trainer.rl.idle_rollouts.time.monotonic", lambda: now[0])
    for now[0] in (10.0, 10.2, 10.9, 11.1):
        coordinator._lease()
    assert asked == [600.0, 600.0]


def test_without_a_time_nobody_is_closed(make: Make) -> None:
    coordinator = make(OFFLINE, **{**IDLE, "data__idle_s": "null"})
    coordinator.store.append(calls("old", 1e6))
    assert coordinator.next_batch(0) is None
    assert coordinator.store.rollout("old").summary.state == "open"


def test_two_trainers_take_each_rollout_once(make: Make, tmp_path: Path) -> None:
    one, other = make(OFFLINE, **IDLE), make(OFFLINE, **IDLE)
    other.owner = "another"
    one.store.append([event for n in range(4) for event in calls(f"r{n}", 1000)])
    batches = [each.next_batch(0) for each in (one, other)]
    taken = [sorted(batch.selection.rollouts) for batch in batches if batch is not None]
    assert sorted(taken[0] + taken[1]) == ["r0", "r1", "r2", "r3"]


# Rewards that are composed of parts


def test_a_rollout_waits_for_the_sum_that_its_reward_is_a_part_of(make: Make) -> None:
    coordinator = make(OFFLINE, rewards__weights='{"thumbs": 2.0}', rewards__agent_error=-1.0)
    store = coordinator.store
    for name in ("a", "b", "c"):
        store.append(rollout_events(name, reward=0.5, at=time.time() - 5))
    assert coordinator.next_batch(0) is None, "nobody composed a reward"
    store.append(crashed("crashed"))
    for name, value in (("a", 1.0), ("b", 0.0)):
        thumbs = [Reward(rollout_id=name, value=value, name="thumbs")]
        store.append([*thumbs, Reward(rollout_id=name, value=2 * value, source="composed")])
    store.append([Reward(rollout_id="a", value=9.0)])
    assert coordinator.crash_reward is not None
    coordinator.crash_reward._asked = -1e9
    batch = coordinator.next_batch(0)
    assert batch is not None
    given = {each.rollout_id: each.reward for each in batch.groups[0].rollouts}
    assert given == {"a": 2.0, "b": 0.0, "crashed": -1.0}


def test_how_scorers_ended_is_a_metric_of_the_step(make: Make) -> None:
    coordinator = make(OFFLINE)
    store = coordinator.store
    fill(str(coordinator.settings.proxy.store.get_secret_value()), groups=2)
    one = {"digest": "d", "turns": 1, "round": 0, "seconds": 1.5}
    [first, second, *_] = (each.rollout_id for each in store.rollouts())
    store.record_scorings(
        [
            Scoring(rollout_id=first, scorer="tests", state="scored", parts={"tests": 1.0}, **one),
            Scoring(rollout_id=second, scorer="tests", state="failed", error="no", **one),
        ],
        [],
    )
    batch = coordinator.next_batch(0)
    assert batch is not None
    made = coordinator.record(batch, step=1, version=1, metrics={}, dropped_rows=(), weights=0)
    assert {k: v for k, v in made.step.metrics.items() if k.startswith("score")} == {
        "scored_tests": 1.0,
        "score_unknown_tests": 0.0,
        "score_failed_tests": 1.0,
        "score_seconds_tests": 3.0,
    }
    later = coordinator.record(batch, step=2, version=2, metrics={}, dropped_rows=(), weights=0)
    assert "scored_tests" not in later.step.metrics
