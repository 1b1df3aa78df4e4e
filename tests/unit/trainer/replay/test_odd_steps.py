"""Steps that ran on several ranks, lost rows, or whose turns are no longer what they were."""

from __future__ import annotations

import time
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from sqlalchemy import select, update
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.trainer.ranks import run_on_ranks
from support.trainer.row_samples import POISON, VOCABULARY, tiny_model
from support.trainer.step_samples import (
    SEVERAL,
    fill,
    roll_back,
    rollout,
    train,
    trained,
    trainer_settings,
)
from tracegrad.events import Turn, token_id_array
from tracegrad.store import PolicyVersion, StepHistory, Store
from tracegrad.store.maintenance import RetentionRule, RolloutSelection, prune
from tracegrad.store.models import Steps
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.replay import render
from tracegrad_trainer.replay.load import ReplayError, list_candidates
from tracegrad_trainer.replay.replay import ReplayRequest, ReplayResult, replay


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    """One step was taken."""
    return trained(tmp_path, 2, 1)


def replayed(settings: TrainerSettings, **asked: object) -> ReplayResult:
    with Store.open(settings.proxy.store, create=False) as store:
        return replay(store, settings.state_dir, ReplayRequest(**asked))  # type: ignore[arg-type]


def problems(settings: TrainerSettings) -> list[str | None]:
    with Store.open(settings.proxy.store, create=False) as store:
        return [one.problem for one in list_candidates(store, settings.state_dir, limit=9)]


def test_a_batch_of_several_updates_of_two_ranks_is_replayed_by_two(tmp_path: Path) -> None:
    settings = trainer_settings(tmp_path, ranks=2, optim=SEVERAL, batches=BATCHES_OF_FOUR)
    with Store.open(settings.proxy.store) as store:
        fill(store, 2)
    run_on_ranks(train, 2, settings, 1)
    found = replayed(settings, preset="dr_grpo")
    assert found.recorded.batch.ranks == 2
    assert found.replayed.metrics["updates"] == 4
    assert found.compared["step_share"] == (0.5, 0.5), "rank 0's, on both"
    assert found.replayed.metrics["policy_k3"] > 0
    assert found.equal, found.differing
    assert found.other is not None
    assert found.other.metrics["loss"] != found.replayed.metrics["loss"]
    assert {turn.turn_id for turn in found.replayed.turns} == found.recorded.trained
    assert sum(abs(turn.gradient_share) for turn in found.replayed.turns) == pytest.approx(1)
    # An error of the ranks is one line too.
    other_model(tmp_path / "model")
    with pytest.raises(ReplayError, match=r"^--model .*: the weights in it are others than those"):
        replayed(settings)


def other_model(folder: Path) -> None:
    """A model that knows fewer tokens than the one that was trained."""
    config = Qwen3Config.from_pretrained(folder)
    config.vocab_size = VOCABULARY // 2
    Qwen3ForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize("between", [1, 9])  # steps to the next checkpoint
def test_the_first_step_after_a_rollback_begins_without_momentum(
    tmp_path: Path, between: int
) -> None:
    """Its second update shows it: the first one's follows from the momentum too."""
    settings = trained(tmp_path, 12, 2, optim=SEVERAL, checkpoint={"keep": 9})
    with Store.open(settings.proxy.store) as store:
        for version in range(3):
            detail = {"weights_step": version}
            store.record_version(PolicyVersion(version, version or None, "serving", detail=detail))
    roll_back(settings, 1, weights=1, newest=2)
    settings = settings.model_copy(
        update={"checkpoint": settings.checkpoint.model_copy(update={"every_steps": between})}
    )
    train(settings, 2)
    for step, cleared in ((2, False), (3, True), (4, False)):
        found = replayed(settings, step=step)
        assert found.recorded.batch.momentum_cleared == cleared
        assert found.replayed.metrics["updates"] == 4
        assert found.equal, (step, found.differing)


def test_rows_that_were_not_finite_leave_the_replay_too(tmp_path: Path) -> None:
    settings = trainer_settings(tmp_path)
    tiny_model(tmp_path / "model", poisoned=True)
    with Store.open(settings.proxy.store) as store:
        fill(store, 1)
        for n in range(2):
            events = rollout(f"p{n}", "p", reward=float(n), seed=70 + n, at=2000.0 + n)
            if n:  # a token that makes no number of everything behind it
                events = [_poisoned(f) if isinstance(f, Turn) else f for f in events]
            store.append(events)
        train(settings, 1)
    found = replayed(settings)
    assert found.recorded.batch.dropped_rows
    assert found.replayed.metrics["rows_dropped"] == 1
    assert found.equal, found.differing
    assert {turn.rollout_id for turn in found.replayed.turns} >= {"t0r0", "t0r1", "p0"}


def _poisoned(turn: Turn) -> Turn:
    prompt = token_id_array(turn.prompt_token_ids)
    prompt[1] = POISON
    return Turn(
        **{
            name: getattr(turn, name)
            for name in ("turn_id", "rollout_id", "parent_id", "dialect", "model", "created_at")
        },
        prompt_token_ids=prompt,
        completion_token_ids=turn.completion_token_ids,
        completion_logprobs=turn.completion_logprobs,
        policy_versions=turn.policy_versions,
    )


def test_removed_rollouts_are_named(settings: TrainerSettings) -> None:
    assert problems(settings) == [None]
    with Store.open(settings.proxy.store) as store:
        prune(store, RetentionRule(selection=RolloutSelection(before=time.time())))
    with pytest.raises(ReplayError, match=r"^4 of the 4 rollouts of step 1 were removed"):
        replayed(settings)
    assert problems(settings) == ["12 of its turns were removed"]


def test_text_that_is_gone_does_not_matter_but_tokens_do(settings: TrainerSettings) -> None:
    with Store.open(settings.proxy.store) as store, store.exclusive() as connection:
        connection.exec_driver_sql("UPDATE turns SET request = NULL, response = NULL")
    assert replayed(settings).equal
    with Store.open(settings.proxy.store) as store:
        sql = "UPDATE turns SET untrainable = 'redacted' WHERE turn_id = 't1r0.2'"
        with store.exclusive() as connection:
            connection.exec_driver_sql(sql)
    words = r"^1 of the 12 turns that step 1 trained .* t1r0\.2\): its tokens were redacted$"
    with pytest.raises(ReplayError, match=words):
        replayed(settings)


def test_a_step_without_its_batch_cannot_be_replayed(settings: TrainerSettings) -> None:
    with Store.open(settings.proxy.store) as store, store.exclusive() as connection:
        connection.execute(update(Steps).values(batch=None))
    with pytest.raises(ReplayError, match="before steps said what they were made of"):
        replayed(settings)
    assert problems(settings) == ["recorded without its batch"]


def test_another_model_is_not_taken_for_the_one_that_was_trained(
    settings: TrainerSettings, tmp_path: Path
) -> None:
    gone = tmp_path / "elsewhere"
    (tmp_path / "model").rename(gone)
    with pytest.raises(ReplayError, match=r"^the settings of step 1: model: .* there is no such"):
        replayed(settings)
    assert replayed(settings, model=gone).equal, "a folder that was moved"
    other_model(gone)
    words = rf"^--model '{gone}': the checkpoints were trained from '.*model' \(step 1\); name"
    with pytest.raises(ReplayError, match=words):
        replayed(settings, model=gone)


def test_state_that_was_moved_is_found(tmp_path: Path) -> None:
    settings = trained(tmp_path, 4, 2)
    moved = tmp_path / "moved"
    settings.state_dir.rename(moved)
    with Store.open(f"sqlite:///{moved}/store.db", create=False) as store:
        found = replay(store, moved, ReplayRequest())
    assert found.recorded.checkpoint == moved / "checkpoints" / "step-00000001"
    assert found.equal


def test_a_step_that_other_settings_leave_nothing_of_is_shown(settings: TrainerSettings) -> None:
    found = replayed(settings, overrides=["batches.max_row_tokens=2", "batches.over_long=drop"])
    assert found.equal
    assert found.other is not None
    assert found.other.turns == []
    assert set(found.other.skipped.values()) == {"over_long"}
    assert np.isfinite(found.other.metrics["loss"])


def test_a_step_that_went_on_from_an_older_checkpoint_is_replayed_from_it(tmp_path: Path) -> None:
    settings = trained(tmp_path, 4, 2, checkpoint={"keep": 9})
    (settings.checkpoints / "step-00000002" / "counters.json").unlink()
    again = trainer_settings(tmp_path, checkpoint={"keep": 9, "resume_from": 1})
    with Store.open(settings.proxy.store) as store:
        fill(store, 2, first=4)
    train(again, 1)
    found = replayed(settings, step=3)
    assert found.recorded.batch.weights == 1
    assert found.recorded.checkpoint == settings.checkpoints / "step-00000001"
    assert found.equal


def test_another_torch_is_named_where_numbers_differ(settings: TrainerSettings) -> None:
    with Store.open(settings.proxy.store) as store, store.exclusive() as connection:
        batch = connection.execute(select(Steps.batch)).scalar_one()
        metrics = connection.execute(select(Steps.metrics)).scalar_one()
        changed = {"batch": {**batch, "torch": "1.0"}, "metrics": {**metrics, "loss": 9.0}}
        connection.execute(update(Steps).values(**changed))
    shown = Console(width=100, record=True, file=StringIO())
    shown.print(render.render_replay(replayed(settings)))
    assert "The step was made with torch 1.0, this is" in shown.export_text()


def few_useful(folder: Path) -> TrainerSettings:
    """A whole step, one of a batch of which one group of four has different rewards, and a whole
    one that goes on from its checkpoint."""
    settings = trainer_settings(folder, batches=BATCHES_OF_FOUR, checkpoint={"keep": 9})
    with Store.open(settings.proxy.store) as store:
        fill(store, 5)
        for task in ("x", "y", "z"):
            for n in range(2):
                at = 2000.0 + n
                store.append(rollout(f"{task}{n}", task, reward=1.0, seed=40 + n, at=at))
        fill(store, 4, first=200)
    for _ in range(3):
        train(settings, 1)
    return settings


BATCHES_OF_FOUR = {"groups": 4, "group_size": 2, "tokens_per_micro_batch": 64}


def test_a_step_of_few_groups_with_a_signal_is_a_share_of_one_and_replayed_as_such(
    tmp_path: Path,
) -> None:
    settings = few_useful(tmp_path)
    with Store.open(settings.proxy.store) as store:
        whole, part, after = (step.metrics for step in StepHistory(store).steps())
    assert (whole["groups_trained"], whole["step_share"], whole["lr"]) == (4, 1, 1e-2)
    assert (part["groups_equal_reward"], part["groups_trained"]) == (3, 1)
    assert (part["step_share"], part["lr"]) == (0.25, 1e-2 / 4)
    assert (after["step_share"], after["lr"]) == (1, 1e-2)
    found = replayed(settings, step=2)
    assert found.equal
    assert found.compared["step_share"] == (0.25, 0.25)
    full = replayed(settings, step=2, overrides=["optim.scale_by_groups=false"])
    assert full.other is not None
    assert (full.other.metrics["step_share"], full.other.metrics["lr"]) == (1, 1e-2)
    assert replayed(settings, step=3).equal, "its moments are of a step and a quarter"


def test_a_step_that_was_recorded_before_there_were_shares_is_replayed_whole(
    tmp_path: Path,
) -> None:
    settings = trained(
        tmp_path, 2, 1, batches=BATCHES_OF_FOUR, optim={"lr": 1e-2, "scale_by_groups": False}
    )
    with Store.open(settings.proxy.store) as store, store.exclusive() as connection:
        stored = connection.execute(select(Steps.settings)).scalar_one()
        del stored["optim"]["scale_by_groups"]
        connection.execute(update(Steps).values(settings=stored))
    found = replayed(settings)
    assert found.equal
    assert found.compared["lr"] == (1e-2, 1e-2)
    assert found.replayed.metrics["step_share"] == 1
