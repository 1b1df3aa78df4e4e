"""Steps between two checkpoints: made, not committed, and none of them lost or trained twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sqlalchemy import update

from support.trainer.kill_runs import made
from support.trainer.step_samples import fill, train, trainer_settings
from tracegrad.store import LeaseLost, Ledger, PolicyVersion, StepRecord, Store
from tracegrad.store.checkpoint_manifest import manifest_digest
from tracegrad.store.maintenance import RetentionRule, RolloutSelection, examine, prune
from tracegrad.store.models import Steps
from tracegrad_trainer.cli.export import ExportError, checkpoint_to_export
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import CheckpointError, list_checkpoints
from tracegrad_trainer.engine.checkpoint.manifest import checkpoint_step
from tracegrad_trainer.engine.config import CheckpointSettings
from tracegrad_trainer.engine.distributed import release_cached_memory
from tracegrad_trainer.launch.run_state import read_state
from tracegrad_trainer.metrics import MetricSinks
from tracegrad_trainer.replay.load import ReplayError, list_candidates
from tracegrad_trainer.replay.replay import ReplayRequest, replay
from tracegrad_trainer.rl import pending_steps, train_loop
from tracegrad_trainer.rl.committed_checkpoint import resume_checkpoint
from tracegrad_trainer.rl.coordinator import RolloutSupply
from tracegrad_trainer.rl.pending_steps import PendingStep, PendingSteps, checkpoint_is_due
from tracegrad_trainer.rl.train_loop import TrainLoop
from tracegrad_trainer.utils.distributed import StopAllRanks

LONG = 1e9
NOBODY: Any = None


def settings_of(folder: Path, state: str = "state", **checkpoint: Any) -> TrainerSettings:
    """With ten groups of two: five batches."""
    checkpoint = {"keep": 9, **checkpoint}
    settings = trainer_settings(folder, state_dir=folder / state, checkpoint=checkpoint)
    with Store.open(settings.proxy.store) as store:
        fill(store, 10)
    return settings


@contextmanager
def training(settings: TrainerSettings, steps: int) -> Iterator[TrainLoop]:
    """So many steps were made; what is pending stays so."""
    with ExitStack() as stack:
        supply = RolloutSupply(is_open=False)
        loop = TrainLoop(settings, stack, stopping=lambda: False, supply=supply)
        loop.resume()
        for _ in range(steps):
            assert loop.next_action() == "train"
            assert loop.train_batch()
        yield loop


def steps_of(settings: TrainerSettings) -> list[StepRecord]:
    with Store.open(settings.proxy.store) as store:
        return Ledger(store).steps()


def saved(settings: TrainerSettings) -> list[int]:
    return [checkpoint_step(one) for one in list_checkpoints(settings.checkpoints)]


def test_what_a_start_took_of_a_gpu_for_a_while_is_there_for_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[object] = []
    monkeypatch.setattr(train_loop, "release_cached_memory", released.append)
    with training(settings_of(tmp_path), 0) as loop:
        assert released == [loop.learner.device]
    given: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append("back"))
    for kind in ("cpu", "cuda"):
        release_cached_memory(torch.device(kind))
    assert given == ["back"]


@pytest.mark.parametrize(
    ("interval", "steps", "seconds", "busy", "due"),
    [
        ({}, 1, 0, False, True),
        ({}, 1, 0, True, True),
        ({"every_steps": 3}, 2, LONG, False, False),
        ({"every_steps": 3}, 3, 0, False, True),
        ({"every_steps": 3}, 4, 0, True, True),
        ({"every_s": 60}, 99, 59, False, False),
        ({"every_s": 60}, 1, 60, False, True),
        ({"every_s": 60}, 1, 60, True, False),
        ({"every_s": 60, "every_steps": 3}, 3, 0, True, True),
        ({"every_s": 60, "every_steps": 3}, 1, 61, False, True),
        ({"every_s": 60, "every_steps": 3}, 2, 59, False, False),
    ],
)
def test_a_checkpoint_is_due_by_steps_or_by_time(
    interval: dict[str, float], steps: int, seconds: float, busy: bool, due: bool
) -> None:
    found = CheckpointSettings.model_validate(interval)
    assert checkpoint_is_due(found, steps=steps, seconds=seconds, busy=busy) == due


class StandInSaver:
    """Writes nothing."""

    busy = False

    def __init__(self, root: Path) -> None:
        self.root = root

    def start(self, *_: object, **parents: object) -> Path:
        return self.root / "step"


def test_seconds_are_those_since_the_last_checkpoint_and_since_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(pending_steps, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(pending_steps, "CheckpointSaver", StandInSaver)
    settings = trainer_settings(tmp_path, checkpoint={"every_s": 60, "idle_s": 30})
    pending = PendingSteps(settings, None, MetricSinks([]))

    def at(seconds: float) -> tuple[bool, bool]:
        """Whether the next step is to get a checkpoint, and whether those that wait are."""
        now[0] = 1000 + seconds
        return pending.is_due(more=1), pending.is_idle

    assert at(59) == (False, False), "nothing waits"
    pending.add(PendingStep(1))
    assert at(80) == (True, False)
    assert at(89) == (True, True), "for 30 seconds"
    pending.add(PendingStep(2))
    assert at(90) == (True, False), "another step was made"
    pending.save(NOBODY, 2, {}, None)
    assert at(149) == (False, False), "it was begun 59 seconds before"
    assert at(150) == (True, False)
    pending.saver.busy = True  # type: ignore[misc]
    assert at(150) == (False, False), "what is asked for by time waits for the disk"
    pending.add(PendingStep(3))
    assert at(190) == (False, False), "one is being written"


def test_steps_are_committed_with_the_checkpoint_that_has_them(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, every_steps=2)
    with training(settings, 3) as loop, Store.open(settings.proxy.store) as store:
        assert loop.pending.has_checkpoint(2), "it gets one now"
        loop.commit_saved()
        assert [one.step for one in Ledger(store).steps()] == [1, 2]
        has_one = [loop.pending.has_checkpoint(step) for step in range(4)]
        assert has_one == [True, False, True, False]
        assert store.turn_counts().trained == 24, "those of the third are not consumed yet"
        state = read_state(settings.state_dir, "ranks")
        assert state is not None
        assert state["pending"] == [3]
        assert loop.next_action() == "train"
        assert loop.train_batch()
        assert loop.next_action() == "train"
        assert loop.train_batch()
        loop.commit_pending()
        assert store.turn_counts().trained == 60
        assert examine(store).findings == []
    assert saved(settings) == [2, 4, 5]
    found = steps_of(settings)
    names = [None if one.checkpoint is None else Path(one.checkpoint).name for one in found]
    assert names == [None, "step-00000002", None, "step-00000004", "step-00000005"]
    digests = {
        number: manifest_digest(settings.checkpoints / f"step-{number:08d}") for number in (2, 4)
    }
    assert [one.parent_digest for one in found] == [None, None, *[digests[2]] * 2, digests[4]]
    assert [(one.batch or {})["weights"] for one in found] == [0, 1, 2, 3, 4]


def test_what_a_crash_loses_is_trained_again_once(tmp_path: Path) -> None:
    expected = settings_of(tmp_path, "expected")
    train(expected, 5)
    settings = settings_of(tmp_path, "killed", every_steps=3)
    for steps in (2, 5, 2):  # nothing, three steps, and again nothing is committed
        with training(settings, min(steps, 5 - len(steps_of(settings)))) as loop:
            if steps == 5:
                loop.commit_saved()
    assert [one.step for one in steps_of(settings)] == [1, 2, 3]
    train(settings, 2)
    assert made(settings.proxy.store) == made(expected.proxy.store)
    with Store.open(settings.proxy.store) as store:
        assert store.turn_counts().trained == 60
        assert examine(store).findings == []


def serve(loop: TrainLoop) -> None:
    """As after a push."""
    assert loop.store is not None
    loop.store.record_version(PolicyVersion(loop.version, step=loop.step or None, state="serving"))


def lags(loop: TrainLoop) -> list[int]:
    """Of the next batch's tokens."""
    assert loop.next_action() == "train"
    assert loop.batch is not None
    rows = loop.batch.selection.rows
    return sorted({loop.version - int(v) for row in rows for v in row.policy_version[row.keep]})


def test_versions_that_a_crash_loses_make_nothing_stale(tmp_path: Path) -> None:
    """All was sampled by the model folder's weights. Numbers of lost versions are not used again,
    and say nothing of how far the weights have moved: at most 4 updates here."""
    settings = settings_of(tmp_path, every_steps=9)
    for last in (2, 5, 8):  # two steps each time, and the first push
        with training(settings, 0) as loop:
            serve(loop)
            for lag in (0, 1):
                assert lags(loop) == [lag]
                assert loop.train_batch()
                serve(loop)
        assert loop.version == last
    with training(settings, 0) as loop:
        assert loop.version == 9
        for lag in range(4):
            assert lags(loop) == [lag]
            assert loop.train_batch()
        loop.commit_pending()
    with training(settings, 0) as loop:
        assert (loop.step, loop.version) == (4, 13)
        assert lags(loop) == [4]
        assert loop.train_batch()
        loop.commit_pending()
    with Store.open(settings.proxy.store) as store:
        assert store.turn_counts().trained == 60
        assert replay(store, settings.state_dir, ReplayRequest(step=5)).differing == []


def test_nor_do_those_that_an_older_checkpoint_leaves_behind(tmp_path: Path) -> None:
    """Of four steps the last two are gone: version 5 has the weights of version 2."""
    settings = settings_of(tmp_path)
    train(settings, 4)
    (settings.checkpoints / "step-00000004" / ".metadata").unlink()
    other = settings.checkpoint.model_copy(update={"resume_from": 2})
    with training(settings.model_copy(update={"checkpoint": other}), 0) as loop:
        assert (loop.step, loop.version) == (4, 5)
        assert lags(loop) == [2]


def test_a_step_that_is_not_served_from_a_checkpoint_leaves_its_turns_to_nobody(
    tmp_path: Path,
) -> None:
    """While it is pending; when the run ends by an error they are free."""
    settings = settings_of(tmp_path, every_steps=9)
    with training(settings, 2), Store.open(settings.proxy.store) as store:
        assert Ledger(store).ready() == 20 - 8
    with Store.open(settings.proxy.store) as store:
        assert Ledger(store).ready() == 20
        assert Ledger(store).steps() == []


def test_where_nothing_comes_they_are_saved(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, every_s=LONG, idle_s=0)
    with training(settings, 5) as loop:
        loop.leading.supply = RolloutSupply(is_open=True, patience_s=0.0)
        assert loop.next_action() == "save"
        loop.save()
        loop.pending.await_written()
        assert loop.next_action() == "commit"
        loop.commit_saved()
        assert loop.next_action() == "idle"
    assert [one.step for one in steps_of(settings)] == [1, 2, 3, 4, 5]
    assert saved(settings) == [5]


def test_they_are_not_saved_before_they_have_waited(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, every_steps=9, idle_s=LONG)
    with training(settings, 5) as loop:
        loop.leading.supply = RolloutSupply(is_open=True, patience_s=0.0)
        assert loop.next_action() == "idle"


def test_a_checkpoint_that_was_never_committed_keeps_no_other_one_s_place(tmp_path: Path) -> None:
    """A run was killed behind its checkpoint of step 3: the next one has some of 2 and of 4."""
    settings = settings_of(tmp_path, every_steps=2, keep=2)
    with training(settings, 3) as loop:
        loop.commit_saved()
        loop.save()
        loop.pending.await_written()
    assert saved(settings) == [2, 3]
    train(settings, 2)
    assert [one.checkpoint is not None for one in steps_of(settings)] == [False, True, False, True]
    assert saved(settings) == [2, 3, 4], "two that were committed"
    (settings.checkpoints / "step-00000004" / ".metadata").unlink()
    with (
        Store.open(settings.proxy.store) as store,
        pytest.raises(CheckpointError, match=r"which is whole: checkpoint\.resume_from=2"),
    ):
        resume_checkpoint(store, settings)
    other = settings.checkpoint.model_copy(update={"resume_from": 2})
    again = settings.model_copy(update={"checkpoint": other})
    train(again, 1)
    assert saved(settings) == [4, 5], "the older ones go together"


def test_all_of_them_are_given_up_where_the_ledger_refuses_one(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, every_steps=9)
    with training(settings, 2) as loop, Store.open(settings.proxy.store) as store:
        Ledger(store).release(loop.pending.groups[:1])  # as `tracegrad doctor --fix` does
        with pytest.raises(LeaseLost, match="this run's steps 1 to 2 are given up and their check"):
            loop.commit_pending()
        assert Ledger(store).steps() == []
        assert store.turn_counts().trained == 0
    assert saved(settings) == []


def test_steps_that_a_rollback_forestalls_are_given_back(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, every_steps=9)

    def rolled_back() -> AbstractContextManager[None]:
        raise StopAllRanks("version 0 is served again")

    with training(settings, 2) as loop:
        loop.leading.committing = rolled_back
        with pytest.raises(StopAllRanks, match="version 0 is served again"):
            loop.commit_pending()
    with Store.open(settings.proxy.store) as store:
        assert Ledger(store).steps() == []
        assert Ledger(store).ready() == 20
    assert saved(settings) == []


# Who looks back


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainerSettings:
    """Five steps with checkpoints of 3 and 5."""
    settings = settings_of(tmp_path_factory.mktemp("run"), every_steps=3)
    train(settings, 5)
    return settings


@pytest.mark.parametrize(("step", "again"), [(1, []), (3, [1, 2]), (4, []), (5, [4])])
def test_a_step_without_a_checkpoint_before_it_is_replayed(
    run: TrainerSettings, step: int, again: list[int]
) -> None:
    """Those since the last checkpoint are trained again first: to the last bit."""
    with Store.open(run.proxy.store) as store:
        found = replay(store, run.state_dir, ReplayRequest(step=step))
    assert found.differing == []
    assert found.as_json()["trained_again"] == again
    assert saved(run) == [3, 5]


def test_a_step_whose_chain_is_broken_is_not(run: TrainerSettings, tmp_path: Path) -> None:
    with Store.open(run.proxy.store) as store:
        assert [one.problem for one in list_candidates(store, run.state_dir, limit=9)] == [None] * 5
        elsewhere = tmp_path / "elsewhere"
        gone = run.checkpoints.rename(tmp_path / "gone")
        try:
            with pytest.raises(ReplayError, match=r"step 5 began with .* step 3, whose"):
                replay(store, elsewhere, ReplayRequest(step=5))
            found = list_candidates(store, elsewhere, limit=9)
        finally:
            gone.rename(run.checkpoints)
    missing = "the checkpoint before it is gone"
    assert [one.problem for one in found] == [missing, missing, None, None, None]


def test_a_step_is_not_offered_whose_weights_need_turns_that_are_gone(tmp_path: Path) -> None:
    """Those of the step before it, which has no checkpoint of its own."""
    settings = settings_of(tmp_path, every_steps=3)
    train(settings, 5)
    with Store.open(settings.proxy.store) as store:
        prune(store, RetentionRule(selection=RolloutSelection(rollouts=("t0r0", "t0r1"))))
        listed = list_candidates(store, settings.state_dir, limit=9)
        assert {one.step.step: one.problem for one in listed} == {
            5: None,
            4: None,
            3: "6 of step 1's turns were removed",
            2: "6 of step 1's turns were removed",
            1: "6 of its turns were removed",
        }
        for one in listed:
            if one.problem is not None:
                with pytest.raises(ReplayError, match="of step 1 were removed"):
                    replay(store, settings.state_dir, ReplayRequest(step=one.step.step))


def test_no_weights_are_taken_for_those_of_a_step_without_a_checkpoint(
    run: TrainerSettings,
) -> None:
    around = r"step 4 has no checkpoint of its own .* step 3 and step 5 can be taken"
    with pytest.raises(ExportError, match=around):
        checkpoint_to_export(run, 4)
    damaged = run.checkpoints / "step-00000005" / ".metadata"
    content = damaged.read_bytes()
    damaged.unlink()
    try:
        other = run.checkpoint.model_copy(update={"resume_from": 4})
        with Store.open(run.proxy.store) as store, pytest.raises(CheckpointError, match=around):
            resume_checkpoint(store, run.model_copy(update={"checkpoint": other}))
    finally:
        damaged.write_bytes(content)


def test_the_doctor_sees_a_chain_that_was_changed(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, every_steps=2)
    train(settings, 4)
    with Store.open(settings.proxy.store) as store:
        with store.exclusive() as connection:
            connection.execute(update(Steps).where(Steps.step == 3).values(parent_digest="0" * 64))
        found = [one for one in examine(store).findings if one.check == "weights"]
    assert [one.subject for one in found] == ["step 3", "step 4"]
