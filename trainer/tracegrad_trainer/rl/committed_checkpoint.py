"""The checkpoints of committed steps: where they are, and the proof that they are those.

A folder named `step-00000012` proves nothing: a step that was refused or never committed leaves
one of the same name, and two state folders may share a store. A committed step keeps the digest of
its checkpoint's manifest; only a folder whose manifest has that digest is its checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tracegrad.events import Json
from tracegrad.store import StepHistory, StepRecord, Store
from tracegrad.store.checkpoint_manifest import MANIFEST_NAME, manifest_digest
from tracegrad.store.types import Readable
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine.checkpoint.base_model import (
    BaseModelRecord,
    base_model_difference,
    weights_digest,
)
from tracegrad_trainer.engine.checkpoint.manifest import (
    CheckpointError,
    may_exist,
    older_checkpoint_hint,
    read_manifest,
    verify_contents,
)


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """Step `step`'s checkpoint, made by `run_id`. `digest` is its manifest's; None: the step is of
    before revision 0007, and the checkpoint cannot be verified."""

    step: int
    folder: Path
    digest: str | None
    run_id: str | None = None

    def as_parent(self) -> Json:
        """As the manifest of a step that begins with these weights names them."""
        return {"step": self.step, "digest": self.digest or manifest_digest(self.folder)}


def committed_checkpoint_of(record: StepRecord, root: Path) -> CommittedCheckpoint:
    """Looked for in `root`, a state folder's checkpoints (it may have been moved), and where it was
    written, which may be the folder of another run.

    Raises:
        CheckpointError: it is nowhere; one line says which step, folder and run disagree.
    """
    if record.checkpoint is None:
        raise CheckpointError(f"step {record.step} has no checkpoint of its own")
    recorded = Path(record.checkpoint)
    here = root / recorded.name
    if record.manifest_digest is None:
        return CommittedCheckpoint(record.step, _unverified(here, recorded), None)
    for folder in (here, recorded):
        if _digest(folder) == record.manifest_digest:
            return CommittedCheckpoint(record.step, folder, record.manifest_digest, record.run_id)
    raise CheckpointError(_nowhere(record, here, recorded))


def resume_checkpoint(store: Store, settings: TrainerSettings) -> CommittedCheckpoint | None:
    """What training goes on from: the last committed step's, or, where a part of that is missing,
    that of `checkpoint.resume_from`. None: nothing was committed yet.

    Raises:
        CheckpointError: a part is missing, it is not what was committed, or the model folder or
            the adapters are not those that it belongs to.
    """
    last = next(iter(StepHistory(store).steps(1)), None)
    if last is None:
        return None
    other = settings.checkpoint.resume_from
    try:
        found = committed_checkpoint_of(last, settings.checkpoints)
        read_manifest(found.folder)
        if other is not None:
            verify_contents(found.folder)
    except CheckpointError:
        if other is None:
            raise
        record = StepHistory(store).step(other)
        if record is None:
            raise CheckpointError(
                f"checkpoint.resume_from = {other}: no step {other} was committed"
            ) from None
        if record.checkpoint is None:
            raise CheckpointError(
                f"checkpoint.resume_from = {other}: {without_checkpoint(store, other)}"
            ) from None
        found = committed_checkpoint_of(record, settings.checkpoints)
        read_manifest(found.folder)
    check_base_model(store, settings, found)
    return found


def checkpoint_of_step(
    store: Store, settings: TrainerSettings, step: int
) -> CommittedCheckpoint | None:
    """That training can go on from with the weights of `step`; None of step 0: the model folder has
    those.

    Raises:
        CheckpointError: it was not committed, has no checkpoint of its own, or that is not whole.
    """
    if step == 0:
        return None
    record = StepHistory(store).step(step)
    if record is None:
        raise CheckpointError(f"step {step} is not committed (yet)")
    if record.checkpoint is None:
        raise CheckpointError(without_checkpoint(store, step))
    found = committed_checkpoint_of(record, settings.checkpoints)
    read_manifest(found.folder)
    check_base_model(store, settings, found)
    return found


def without_checkpoint(store: Readable, step: int) -> str:
    """Of a step that has none of its own: why, and which steps around it have one."""
    history = StepHistory(store)
    around = (history.last_checkpoint_before(step), history.first_checkpoint_after(step))
    return (
        f"step {step} has no checkpoint of its own (checkpoint.every_steps, every_s);"
        f" {' and '.join(f'step {one.step}' for one in around if one)} can be taken"
    )


def base_model_of(settings: TrainerSettings) -> Json:
    """What a checkpoint's manifest says of the model folder that it belongs to."""
    record = BaseModelRecord.of(settings.model, settings.fsdp.lora)
    return record.model_dump(mode="json")


def check_base_model(
    store: Store | None,
    settings: TrainerSettings,
    found: CommittedCheckpoint,
    *,
    weights: bool = True,
) -> None:
    """That the checkpoint was trained from the settings' model folder, with their adapters;
    without `weights` only adapters need that folder's weights.

    Of checkpoints of earlier versions the step's settings say it: `store` has them.

    Raises:
        CheckpointError: it was not; names the setting, and what to do.
    """
    recorded = read_manifest(found.folder).get("base")
    if recorded is None and store is not None:
        step = StepHistory(store).step(found.step)
        recorded = None if step is None else _base_of_settings(step.settings)
    if recorded is None:
        return
    base = BaseModelRecord.model_validate(recorded)
    if problem := base_model_difference(base, settings.model, settings.fsdp.lora, weights=weights):
        raise CheckpointError(
            f"{problem} (step {found.step}); set it back, or take a new state folder (--state-dir"
            " ...). To begin there with these weights: trainer export"
            f"{' --merged' if base.lora else ''} --out DIR with the former settings, then --model"
            " DIR"
        )


def check_served_model(store: Store, settings: TrainerSettings) -> None:
    """That the store's versions are of the settings' model, where no step was committed that would
    say so: their tokens would pass for this model's.

    Raises:
        CheckpointError: they are of another; names the setting, and what to do.
    """
    recorded = store.served_model()
    if recorded is None or StepHistory(store).count():
        return
    base = BaseModelRecord.model_validate(recorded)
    if base.weights is None or base.weights == weights_digest(settings.model):
        return
    raise CheckpointError(
        f"model = {str(settings.model)!r}: the versions that the store has rollouts of were served"
        f" from {base.path!r}, with other weights; set it back, or give this model a store of its"
        " own (--state-dir ..., or proxy.store)"
    )


def _base_of_settings(stored: Json) -> Json | None:
    """None: they were not recorded."""
    if "model" not in stored or "fsdp" not in stored:
        return None
    return {"path": stored["model"], "lora": stored["fsdp"].get("lora")}


def _unverified(here: Path, recorded: Path) -> Path:
    """Where both are there and differ, the one that the step was committed with."""
    if not may_exist(here) and may_exist(recorded):
        return recorded
    differs = may_exist(recorded) and _digest(here) != _digest(recorded)
    return recorded if differs else here


def _digest(folder: Path) -> str | None:
    try:
        return manifest_digest(folder)
    except OSError:
        return None


def _nowhere(record: StepRecord, here: Path, recorded: Path) -> str:
    """Why: none is there (worded as a missing part is), or other ones are."""
    there = dict.fromkeys(each for each in (here, recorded) if _digest(each) is not None)
    if not there:
        folder = here if may_exist(here) or not may_exist(recorded) else recorded
        try:
            read_manifest(folder)
        except CheckpointError as error:
            return str(error)
    names = " and ".join(map(str, there))
    differs = (
        f"checkpoint {names} is not the one that step {record.step} was committed with: the digest"
        f" of its {MANIFEST_NAME} is not {record.manifest_digest}"
    )
    if here == recorded:
        return differs + older_checkpoint_hint(here)
    return (
        f"{differs}; run {record.run_id} committed the step, with {recorded}: start in that run's"
        " state folder, put its checkpoint back from a copy, or give this folder a store of its"
        " own (proxy.store)"
    )
