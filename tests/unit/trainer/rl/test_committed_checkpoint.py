"""Only the checkpoint that a step was committed with is gone on from, whoever's folder it is in."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from support.trainer.step_samples import fill, train, trainer_settings
from tracegrad.store import Ledger, LedgerError, StepRecord, Store
from tracegrad.store.checkpoint_manifest import manifest_digest
from tracegrad.store.maintenance import Finding, examine
from tracegrad_trainer.batches import BatchSettings, select
from tracegrad_trainer.cli.export import ExportError, checkpoint_to_export
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import CheckpointError
from tracegrad_trainer.engine.checkpoint.manifest import discard_checkpoint, read_manifest
from tracegrad_trainer.launch.run_state import run_id
from tracegrad_trainer.replay.load import ReplayError, list_candidates, load_recorded_step
from tracegrad_trainer.rl.committed_checkpoint import committed_checkpoint_of
from tracegrad_trainer.rl.coordinator import Coordinator, RolloutSupply, resume_point
from tracegrad_trainer.rl.train_loop import TrainLoop

OFFLINE = RolloutSupply(is_open=False)


def folder(settings: TrainerSettings, step: int) -> Path:
    return settings.checkpoints / f"step-{step:08d}"


def state_of(tmp_path: Path, name: str) -> TrainerSettings:
    """State folders a and b are on one store, with five batches in it."""
    proxy = {"store": f"sqlite:///{tmp_path}/store.db"}
    return trainer_settings(
        tmp_path, state_dir=tmp_path / name, proxy=proxy, checkpoint={"keep": 9}
    )


@pytest.fixture
def one(tmp_path: Path) -> TrainerSettings:
    settings = state_of(tmp_path, "a")
    with Store.open(settings.proxy.store) as store:
        fill(store, 10)
    return settings


@pytest.fixture
def other(one: TrainerSettings, tmp_path: Path) -> TrainerSettings:
    return state_of(tmp_path, "b")


def steps(settings: TrainerSettings) -> list[StepRecord]:
    with Store.open(settings.proxy.store) as store:
        return Ledger(store).steps()


def weighed(settings: TrainerSettings) -> list[Finding]:
    """What the doctor says of steps."""
    with Store.open(settings.proxy.store) as store:
        return [f for f in examine(store).findings if f.check in ("weights", "twice", "leases")]


def killed_before_the_commit(settings: TrainerSettings) -> None:
    """Its checkpoint is whole, and has its name."""
    with ExitStack() as stack:
        training = TrainLoop(settings, stack, stopping=lambda: False, supply=OFFLINE)
        training.resume()
        assert training.next_action() == "train"
        assert training.train_batch()
        training.pending.saver.wait()


def forget_digests(settings: TrainerSettings) -> None:
    """As revision 0006 stored steps."""
    with Store.open(settings.proxy.store) as store, store.exclusive() as connection:
        names = "run_id = NULL, manifest_digest = NULL, parent_digest = NULL"
        connection.execute(text(f"UPDATE steps SET {names}"))
        owner = {"owner": f"host:{settings.state_dir}"}
        connection.execute(text("UPDATE rollouts SET lease_owner = :owner"), owner)


def test_steps_keep_their_run_and_the_chain_of_their_weights(one: TrainerSettings) -> None:
    train(one, 2)
    first, second = steps(one)
    assert first.run_id == second.run_id == run_id(one.state_dir)
    assert first.manifest_digest == manifest_digest(folder(one, 1))
    assert second.manifest_digest == manifest_digest(folder(one, 2))
    assert first.parent_digest is None, "the model folder's"
    assert second.parent_digest == first.manifest_digest
    counters = json.loads((folder(one, 2) / "counters.json").read_text())
    assert counters["parent"] == {"step": 1, "digest": first.manifest_digest}
    assert weighed(one) == []


# Of whatever is below it nothing can be read, as in another user's folder: by root neither.
CLOSED = Path("/") / ("closed" * 50)


def test_a_checkpoint_in_another_users_folder_is_one_line(one: TrainerSettings) -> None:
    theirs = CLOSED / "checkpoints" / "step-00000001"
    for digest in (None, "1" * 64):
        made = StepRecord(
            step=1, version=1, checkpoint=str(theirs), run_id="r", manifest_digest=digest
        )
        with pytest.raises(CheckpointError, match=f"{theirs}.* cannot be read: OSError"):
            read_manifest(committed_checkpoint_of(made, one.checkpoints).folder)
    with Store.open(one.proxy.store) as store:
        Ledger(store).commit_step(made, trained=[], skipped={}, rollouts=[])
        with pytest.raises(CheckpointError, match="cannot be read"):
            resume_point(one, store)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint_to_export(one, 1)
    assert [finding.check for finding in weighed(one)] == []


def test_a_refused_steps_checkpoint_is_removed_and_the_run_goes_on_from_the_committed_one(
    one: TrainerSettings, other: TrainerSettings, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        slow = TrainLoop(other, stack, stopping=lambda: False, supply=OFFLINE)
        slow.resume()
        assert slow.next_action() == "train"
        assert slow.train_batch()
        # The first trainer's step comes in between; both ran in this process' one group.
        with Store.open(one.proxy.store) as store:
            shutil.copytree(one.model, folder(one, 1))  # any weights but those
            (folder(one, 1) / "counters.json").write_text('{"step": 1, "files": {}}')
            Ledger(store).commit_step(
                StepRecord(
                    step=1,
                    version=1,
                    checkpoint=str(folder(one, 1)),
                    run_id="a",
                    manifest_digest=manifest_digest(folder(one, 1)),
                ),
                trained=[],
                skipped={},
                rollouts=[],
            )
        with pytest.raises(LedgerError, match="step 1 is in the ledger already: run a committed"):
            slow.commit_pending()
    assert list(other.checkpoints.iterdir()) == []
    with Store.open(other.proxy.store) as store:
        assert Ledger(store).ready() == 20, "its turns are free"
        coordinator = Coordinator(other, store, stopping=lambda: False, supply=OFFLINE)
        point = coordinator.resume_point()
    assert point.weights is not None
    assert point.weights.folder == folder(one, 1)
    assert "going on from step 1, which run a made" in caplog.text


def test_a_checkpoint_that_was_never_committed_is_not_loaded_as_the_committed_step(
    one: TrainerSettings, other: TrainerSettings, caplog: pytest.LogCaptureFixture
) -> None:
    killed_before_the_commit(other)
    assert folder(other, 1).is_dir()
    train(one, 1)
    [first] = steps(one)
    assert manifest_digest(folder(other, 1)) != first.manifest_digest
    # The chain goes on in the other folder, from the checkpoint that was committed.
    train(other, 1)
    assert f"which run {first.run_id} made" in caplog.text
    second = steps(one)[-1]
    assert second.run_id == run_id(other.state_dir) != first.run_id
    assert second.parent_digest == first.manifest_digest
    assert second.checkpoint == str(folder(other, 2))
    with Store.open(one.proxy.store) as store:
        assert load_recorded_step(store, 2, other.state_dir).checkpoint == folder(one, 1)
    assert checkpoint_to_export(other, 1).folder == folder(one, 1)
    assert weighed(one) == []


def test_a_step_whose_checkpoint_is_not_here_is_one_line_that_says_whose_it_is(
    one: TrainerSettings, other: TrainerSettings
) -> None:
    killed_before_the_commit(other)
    train(one, 1)
    [first] = steps(one)
    shutil.rmtree(one.checkpoints)
    with Store.open(other.proxy.store) as store:
        with pytest.raises(CheckpointError) as error:
            resume_point(other, store)
        said = str(error.value)
        assert f"{folder(other, 1)} is not the one that step 1 was committed with" in said
        assert f"run {first.run_id} committed the step, with {folder(one, 1)}" in said
        assert "start in that run's state folder" in said
        assert "\n" not in said
        with pytest.raises(CheckpointError, match="is not the one that step 1"):
            checkpoint_to_export(other, 1)
        resumes = other.model_copy(
            update={"checkpoint": other.checkpoint.model_copy(update={"resume_from": 1})}
        )
        with pytest.raises(CheckpointError, match="is not the one that step 1"):
            resume_point(resumes, store)


def test_a_replay_does_not_begin_with_anothers_weights(
    one: TrainerSettings, other: TrainerSettings
) -> None:
    train(one, 2)
    shutil.copytree(folder(one, 2), folder(other, 1))
    shutil.rmtree(folder(one, 1))
    with Store.open(one.proxy.store) as store:
        with pytest.raises(ReplayError, match="is not the one that step 1 was committed with"):
            load_recorded_step(store, 2, other.state_dir)
        problems = [each.problem for each in list_candidates(store, other.state_dir, limit=9)]
        assert problems == ["the checkpoint before it is not the one that was committed", None]


def test_what_was_never_committed_is_not_exported(other: TrainerSettings) -> None:
    killed_before_the_commit(other)
    with pytest.raises(ExportError, match=r"--step 1: the checkpoint in .* was never committed"):
        checkpoint_to_export(other, 1)


def test_an_older_checkpoint_must_be_of_a_committed_step(one: TrainerSettings) -> None:
    train(one, 2)
    (folder(one, 2) / ".metadata").unlink()
    shutil.copytree(folder(one, 1), folder(one, 7))

    def resumes(step: int) -> TrainerSettings:
        older = one.checkpoint.model_copy(update={"resume_from": step})
        return one.model_copy(update={"checkpoint": older})

    with (
        Store.open(one.proxy.store) as store,
        pytest.raises(CheckpointError, match="resume_from = 7: no step 7 was committed"),
    ):
        resume_point(resumes(7), store)
    train(resumes(1), 1)
    first, _, third = steps(one)
    assert third.parent_digest == first.manifest_digest
    [finding] = weighed(one)
    assert (finding.check, finding.broken) == ("weights", False)
    assert "the updates of the steps after that, up to 2, are lost" in finding.message


def test_a_manifest_that_was_changed_is_named_with_an_older_checkpoint(
    one: TrainerSettings,
) -> None:
    train(one, 2)
    manifest = folder(one, 2) / "counters.json"
    manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 3'))
    with Store.open(one.proxy.store) as store, pytest.raises(CheckpointError) as error:
        resume_point(one, store)
    assert "is not the one that step 2 was committed with" in str(error.value)
    assert "checkpoint.resume_from=1" in str(error.value)
    [finding] = weighed(one)
    assert (finding.check, finding.subject, finding.broken) == ("weights", "step 2", True)
    assert "is not the checkpoint that it was committed with" in finding.message


def test_steps_of_before_the_digests_are_gone_on_from_and_that_is_said(
    one: TrainerSettings, caplog: pytest.LogCaptureFixture
) -> None:
    train(one, 1)
    forget_digests(one)
    train(one, 1)
    assert "step 1 was committed before steps kept their checkpoint's digest" in (caplog.text)
    first, second = steps(one)
    assert (first.manifest_digest, second.parent_digest) == (None, None)
    assert second.manifest_digest == manifest_digest(folder(one, 2))
    counters = json.loads((folder(one, 2) / "counters.json").read_text())
    assert counters["parent"] == {"step": 1, "digest": manifest_digest(folder(one, 1))}
    assert weighed(one) == []


def test_of_two_unverifiable_checkpoints_the_recorded_one_is_taken(
    one: TrainerSettings, other: TrainerSettings
) -> None:
    """What an earlier version did not do: it took any folder of the name in its own state."""
    killed_before_the_commit(other)
    train(one, 1)
    forget_digests(one)
    with Store.open(other.proxy.store) as store:
        point = resume_point(other, store)
        assert point.weights is not None
        assert point.weights.folder == folder(one, 1)
        shutil.rmtree(one.checkpoints)  # it moved
        point = resume_point(other, store)
        assert point.weights is not None
        assert point.weights.folder == folder(other, 1)


# What got in before


def record(settings: TrainerSettings, step: StepRecord) -> None:
    with Store.open(settings.proxy.store) as store:
        Ledger(store).commit_step(step, trained=[], skipped={}, rollouts=[])


def test_the_doctor_finds_a_step_that_began_with_a_refused_steps_weights(
    one: TrainerSettings, other: TrainerSettings
) -> None:
    """As an earlier version left it: its own refused step 1 was loaded as the committed one."""
    killed_before_the_commit(other)
    train(one, 1)
    forget_digests(one)
    shutil.copytree(folder(other, 1), folder(other, 2))
    record(
        one,
        StepRecord(step=2, version=2, checkpoint=str(folder(other, 2)), batch={"weights": 1}),
    )
    [finding] = weighed(one)
    assert (finding.check, finding.subject, finding.broken) == ("weights", "step 2", True)
    assert f"has a step-00000001 of its own, other than {folder(one, 1)}" in finding.message
    assert "resume_from" in finding.fix


def test_the_doctor_finds_weights_that_are_no_chain(one: TrainerSettings) -> None:
    train(one, 2)
    with Store.open(one.proxy.store) as store, store.exclusive() as connection:
        connection.execute(text("UPDATE steps SET parent_digest = 'ff' WHERE step = 2"))
    found = weighed(one)
    assert {(f.check, f.subject, f.broken) for f in found} == {("weights", "step 2", True)}
    assert any("it began with weights of digest ff…, and step 1" in f.message for f in found)


def test_the_doctor_finds_what_one_step_trained_twice(one: TrainerSettings) -> None:
    train(one, 1)
    [first] = steps(one)
    assert first.batch is not None
    groups = first.batch["groups"]
    twice = {**first.batch, "groups": [*groups, groups[0]], "weights": 0}
    with Store.open(one.proxy.store) as store, store.exclusive() as connection:
        connection.execute(text("UPDATE steps SET batch = :batch"), {"batch": json.dumps(twice)})
    record(one, replace(first, step=2, batch={**first.batch, "weights": 1}))
    found = {f.subject: f for f in weighed(one) if f.check == "twice"}
    assert found["step 1"].message.startswith("its batch names 2 rollouts more than once")
    assert "it trained 6 turns of theirs as often" in found["step 1"].message
    assert "of step 1)" in found["step 2"].message
    assert all(f.broken and "cannot be taken back" in f.fix for f in found.values())


def test_the_doctor_finds_rollouts_that_were_consumed_under_anothers_lease(
    one: TrainerSettings,
) -> None:
    train(one, 2)
    assert weighed(one) == []
    with Store.open(one.proxy.store) as store, store.exclusive() as connection:
        connection.execute(
            text("UPDATE rollouts SET lease_owner = 'h:/elsewhere' WHERE consumed_step = 2")
        )
    [finding] = weighed(one)
    assert (finding.check, finding.subject, finding.count) == ("leases", "step 2", 4)
    assert "h:/elsewhere had leased, and was made in" in finding.message


# Odds


def test_a_run_keeps_its_id(tmp_path: Path) -> None:
    first = run_id(tmp_path / "a")
    assert run_id(tmp_path / "a") == first != run_id(tmp_path / "b")
    assert [path.name for path in (tmp_path / "a" / "run").iterdir()] == ["id"]


def test_what_is_discarded_loses_its_name(tmp_path: Path) -> None:
    where = tmp_path / "step-00000001"
    where.mkdir()
    (where / "part").touch()
    discard_checkpoint(where)
    discard_checkpoint(where)
    assert list(tmp_path.iterdir()) == []


def test_a_turn_that_is_in_a_batch_twice_is_not_selected(one: TrainerSettings) -> None:
    with Store.open(one.proxy.store) as store:
        groups = Ledger(store).preview(groups=2, group_size=2).groups
        with pytest.raises(ValueError, match=r"turn t0r0\.0 of rollout t0r0 is in the batch twice"):
            select(
                [*groups, groups[0]],
                BatchSettings(group_size=2),
                advantages=lambda rollouts: [[0.0] * len(r.states) for r in rollouts],  # type: ignore[misc]
                current_version=0,
            )
