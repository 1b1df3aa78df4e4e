"""The run of a replay, on every rank: the recorded step's turns, trained once more.

Nothing is committed and nothing is written. With one rank it runs in the process that asks; with
more, in those that torch.distributed's launcher starts (`replay.main`).
"""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tracegrad_trainer.batches import TrainingSelection, select
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import (
    CheckpointError,
    destroy_process_group,
    init_process_group,
    load_checkpoint,
    train_batch,
)
from tracegrad_trainer.engine.checkpoint.save_load import CheckpointSaver
from tracegrad_trainer.engine.random_state import seed_all
from tracegrad_trainer.engine.step.learner import Learner
from tracegrad_trainer.engine.step.optimizer import clear_momentum
from tracegrad_trainer.engine.step.result import StepResult
from tracegrad_trainer.engine.step.train_batch import deal_rows
from tracegrad_trainer.losses import compute_advantages
from tracegrad_trainer.replay.load import RecordedStep, ReplayError, check_selection
from tracegrad_trainer.replay.turn_contributions import TurnContribution, turn_contributions
from tracegrad_trainer.rl.build_learner import (
    build_learner,
    engine_routing_layout,
    model_vocab_size,
)


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """One recorded step, trained under each of the settings; the first ones are its own. `folder`
    is for the checkpoint that it began with, where that must be made again."""

    recorded: RecordedStep
    settings: list[TrainerSettings]
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRun:
    """What came of one run; rank 0's."""

    metrics: dict[str, float]
    turns: list[TurnContribution]
    skipped: dict[str, str]
    dropped_rows: list[int]
    seconds: float


def run_on_this_rank(job: ReplayJob) -> list[ReplayRun]:
    """On this rank, together with the others; [] on all but rank 0.

    Raises:
        ReplayError, ValueError: the step cannot be run like that.
    """
    threads = torch.get_num_threads()
    first = job.settings[0]
    layout = first.fsdp.model_copy(update={"threads": job.recorded.batch.threads})
    try:
        with ExitStack() as stack:
            mesh = init_process_group(layout)
            stack.callback(destroy_process_group)
            recorded = job.recorded
            if recorded.since:
                made = _make_checkpoint(recorded, first, mesh, job.folder)
                recorded = replace(recorded, checkpoint=made, digest=None, since=())
            return [
                ran
                for number, settings in enumerate(job.settings)
                if (ran := _run(recorded, settings, mesh, own=number == 0)) is not None
            ]
    except CheckpointError as error:
        raise ReplayError(str(error)) from None
    finally:
        torch.set_num_threads(threads)


def _make_checkpoint(
    recorded: RecordedStep, settings: TrainerSettings, mesh: DeviceMesh, folder: Path
) -> Path:
    """That of the step before: the steps since the last checkpoint are trained again. They were
    made by one process, as this one was: with the same settings, ranks and threads."""
    learner = _learner(recorded, settings, mesh)
    for one in recorded.since:
        selection = _selection(one, settings, model_vocab_size(learner.model))
        left = selection.without_rows(one.batch.dropped_rows, "non_finite")
        check_selection(one, left.trained, left.skipped)
        _train(learner, selection, settings, one.batch.version)
    saver = CheckpointSaver(folder)
    made = saver.start(learner, recorded.since[-1].step.step, {})
    saver.wait()
    return made


def _learner(recorded: RecordedStep, settings: TrainerSettings, mesh: DeviceMesh) -> Learner:
    """With the weights of the recorded checkpoint, or the model folder's."""
    seed_all(settings.seed + dist.get_rank())  # as a trainer that starts
    learner = build_learner(
        settings, mesh, adamw=recorded.batch.adamw, packing=recorded.batch.packing_rule
    )
    if recorded.checkpoint is not None:
        load_checkpoint(learner, recorded.checkpoint, digest=recorded.digest)
        first = recorded.since[0] if recorded.since else recorded
        if first.batch.momentum_cleared:
            clear_momentum(learner.optimizer)
    return learner


def _train(
    learner: Learner, selection: TrainingSelection, settings: TrainerSettings, version: int
) -> StepResult:
    return train_batch(
        learner,
        selection.rows if dist.get_rank() == 0 else None,
        version=version,
        budget=settings.batches.tokens_per_micro_batch,
        seed=settings.seed,
        share=settings.step_share(selection.stats["groups_trained"]),
    )


def _run(
    recorded: RecordedStep, settings: TrainerSettings, mesh: DeviceMesh, *, own: bool
) -> ReplayRun | None:
    began = monotonic()
    learner = _learner(recorded, settings, mesh)
    # On every rank, though rank 0's rows are those that are trained: so all of them fail, or none.
    selection = _selection(recorded, settings, model_vocab_size(learner.model))
    if own:
        left = selection.without_rows(recorded.batch.dropped_rows, "non_finite")
        check_selection(recorded, left.trained, left.skipped)
    version, budget = recorded.batch.version, settings.batches.tokens_per_micro_batch
    shares = turn_contributions(
        learner,
        deal_rows(learner.engine, selection.rows, budget=budget)[0],
        version=version,
        rows=selection.rows,
    )
    done = _train(learner, selection, settings, version)
    if dist.get_rank() != 0:
        return None
    left = selection.without_rows(done.dropped, "non_finite")
    return ReplayRun(
        metrics={**left.stats, **done.metrics},
        turns=shares,
        skipped=left.skipped,
        dropped_rows=sorted(done.dropped),
        seconds=monotonic() - began,
    )


def _selection(
    recorded: RecordedStep, settings: TrainerSettings, vocabulary: int
) -> TrainingSelection:
    batch = recorded.batch
    memory = deepcopy(batch.memory_before)
    return select(
        recorded.groups,
        settings.batches,
        advantages=partial(compute_advantages, settings.objective, memory=memory),
        current_version=batch.version,
        failed_versions=batch.failed_versions,
        skipped_versions=batch.skipped_versions,
        rolled_back_versions=batch.rolled_back_versions,
        vocabulary=vocabulary,
        routing=engine_routing_layout(settings),
        scopes=recorded.scopes,
    )
