"""Where training goes on after a rollback: checkpoint, numbers, and how stale tokens are."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.trainer.step_samples import fill, roll_back, train, trainer_settings
from tracegrad.store import PolicyVersion, StepHistory, Store
from tracegrad_trainer.batches.version_scale import VersionScale
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import CheckpointError
from tracegrad_trainer.rl.committed_checkpoint import checkpoint_of_step
from tracegrad_trainer.rl.coordinator import ResumePoint, describe_resume, resume_point


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    made = trainer_settings(tmp_path, checkpoint={"keep": 9})
    with Store.open(made.proxy.store) as store:
        fill(store, 12)
    train(made, 2)
    serve(made, (0, 0), (1, 1), (2, 2))
    return made


def serve(settings: TrainerSettings, *versions: tuple[int, int]) -> None:
    """As the ranks record it: a version, and the step that made its weights."""
    with Store.open(settings.proxy.store) as store:
        last = StepHistory(store).steps(1)
        for version, weights in versions:
            step = weights if version <= 2 else last[0].step
            detail = {"weights_step": weights}
            store.record_version(PolicyVersion(version, step or None, "serving", detail=detail))


def point(settings: TrainerSettings) -> ResumePoint:
    with Store.open(settings.proxy.store) as store:
        return resume_point(settings, store)


def test_training_goes_on_from_the_versions_checkpoint_under_a_new_number(
    settings: TrainerSettings,
) -> None:
    roll_back(settings, 1, weights=1, newest=2)
    found = point(settings)
    assert (found.step, found.version) == (2, 3)
    assert found.weights is not None
    assert found.weights.step == 1
    assert "resumes with the weights of step 1" in describe_resume(found, settings)
    scale = VersionScale(found.version, found.skipped)
    assert scale.place(1) == scale.place(3) == 3, "the same weights, under two numbers"
    assert scale.place(0) == 2
    assert scale.place(2) < 3, "an update that is lost is never the present one"


def test_a_restart_before_the_next_step_is_the_same_point(settings: TrainerSettings) -> None:
    roll_back(settings, 1, weights=1, newest=2)
    first = point(settings)
    serve(settings, (3, 1))
    assert point(settings) == first
    # A step that was pushed and never committed takes its number with it.
    with Store.open(settings.proxy.store) as store:
        store.record_version(PolicyVersion(4, 3, "serving", detail={"weights_step": 3}))
    assert point(settings).version == 5


def test_a_step_that_is_committed_ends_it(settings: TrainerSettings) -> None:
    roll_back(settings, 1, weights=1, newest=2)
    serve(settings, (3, 1))
    train(settings, 1)
    with Store.open(settings.proxy.store) as store:
        first, third = StepHistory(store).step(1), StepHistory(store).step(3)
    assert first is not None
    assert third is not None
    assert third.parent_digest == first.manifest_digest
    assert third.version == 4
    found = point(settings)
    assert (found.step, found.version) == (3, 4)
    assert found.weights is not None
    assert found.weights.step == 3
    scale = VersionScale(found.version, found.skipped)
    assert scale.place(1) == scale.place(3) == 3
    assert scale.place(2) < 4


def test_back_to_a_number_that_weights_got_later(settings: TrainerSettings) -> None:
    """1 -> served again as 3 -> trained to 4 -> back to 3, which is 1."""
    roll_back(settings, 1, weights=1, newest=2)
    serve(settings, (3, 1))
    train(settings, 1)
    serve(settings, (4, 3))
    roll_back(settings, 3, weights=1, newest=4)
    found = point(settings)
    assert (found.step, found.version) == (3, 5)
    scale = VersionScale(found.version, found.skipped)
    assert scale.place(1) == scale.place(3) == scale.place(5) == 5
    assert scale.place(4) < 5
    assert scale.place(2) < 5


def test_back_to_the_model_folders_weights(settings: TrainerSettings) -> None:
    roll_back(settings, 0, weights=0, newest=2)
    found = point(settings)
    assert (found.step, found.version, found.weights) == (2, 3, None)
    assert describe_resume(found, settings).startswith("begins again with the weights of")
    train(settings, 1)
    with Store.open(settings.proxy.store) as store:
        third = StepHistory(store).step(3)
    assert third is not None
    assert third.parent_digest is None
    assert third.version == 4


def test_kept_versions_keep_their_checkpoints(tmp_path: Path) -> None:
    made = trainer_settings(tmp_path, checkpoint={"keep": 1})
    with Store.open(made.proxy.store) as store:
        fill(store, 12)
        train(made, 1)
        detail = {"bytes": 1, "weights_step": 1}
        store.note_version(PolicyVersion(1, 1, "kept", detail=detail))
        train(made, 3)
        assert [folder.name for folder in sorted(made.checkpoints.iterdir())] == [
            "step-00000001",
            "step-00000004",
        ]
        store.note_version(PolicyVersion(1, 1, "not_kept", detail={"reason": "beyond_keep"}))
        train(made, 1)
        assert [folder.name for folder in made.checkpoints.iterdir()] == ["step-00000005"]
        with pytest.raises(CheckpointError, match="is missing"):
            checkpoint_of_step(store, made, 1)
        with pytest.raises(CheckpointError, match="step 9 is not committed"):
            checkpoint_of_step(store, made, 9)
