"""The run of a replay, on every rank: the recorded step's turns, trained once more.

Nothing is committed and nothing is written. With one rank it runs in the process that asks; with
more, in those that torch.distributed's launcher starts (`replay_rank`).
"""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from time import monotonic

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tracegrad_trainer.batches import MicroBatch, Selection, pack, select
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import (
    CheckpointError,
    load_checkpoint,
    start_ranks,
    stop_ranks,
    train_batch,
)
from tracegrad_trainer.engine.random_state import seed_all
from tracegrad_trainer.losses import advantages
from tracegrad_trainer.replay.load import Recorded, ReplayError, check_selection
from tracegrad_trainer.replay.turn_contributions import TurnShare, turn_shares
from tracegrad_trainer.rl.build_learner import build_learner, told_routes, vocabulary_of


@dataclass(frozen=True, slots=True)
class Job:
    """One recorded step, trained under each of the settings; the first ones are its own."""

    recorded: Recorded
    settings: list[TrainerSettings]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came of one run; rank 0's."""

    metrics: dict[str, float]
    turns: list[TurnShare]
    skipped: dict[str, str]
    dropped_rows: list[int]
    seconds: float


def run_here(job: Job) -> list[Ran]:
    """On this rank, together with the others; [] on all but rank 0.

    Raises:
        ReplayError, ValueError: the step cannot be run like that.
    """
    threads = torch.get_num_threads()
    first = job.settings[0]
    layout = first.fsdp.model_copy(update={"threads": job.recorded.batch.threads})
    try:
        with ExitStack() as stack:
            mesh = start_ranks(layout)
            stack.callback(stop_ranks)
            return [
                ran
                for number, settings in enumerate(job.settings)
                if (ran := _run(job.recorded, settings, mesh, own=number == 0)) is not None
            ]
    except CheckpointError as error:
        raise ReplayError(str(error)) from None
    finally:
        torch.set_num_threads(threads)


def _run(
    recorded: Recorded, settings: TrainerSettings, mesh: DeviceMesh, *, own: bool
) -> Ran | None:
    began = monotonic()
    seed_all(settings.seed + mesh.get_local_rank())  # as a trainer that starts
    learner = build_learner(settings, mesh)
    if recorded.checkpoint is not None:
        load_checkpoint(learner, recorded.checkpoint, digest=recorded.digest)
    # On every rank, though rank 0's rows are those that are trained: so all of them fail, or none.
    selection = _selection(recorded, settings, vocabulary_of(learner.model))
    if own:
        left = selection.without_rows(recorded.batch.dropped_rows, "non_finite")
        check_selection(recorded, left.trained, left.skipped)
    version, budget = recorded.batch.version, settings.batches.tokens_per_micro_batch
    shares = turn_shares(
        learner,
        _dealt(selection, mesh, budget),
        version=version,
        rows=selection.rows,
        groups=recorded.groups,
    )
    done = train_batch(
        learner,
        selection.rows if dist.get_rank() == 0 else None,
        version=version,
        budget=budget,
        seed=settings.seed,
    )
    if dist.get_rank() != 0:
        return None
    left = selection.without_rows(done.dropped, "non_finite")
    return Ran(
        metrics={**left.stats, **done.metrics},
        turns=shares,
        skipped=left.skipped,
        dropped_rows=sorted(done.dropped),
        seconds=monotonic() - began,
    )


def _selection(recorded: Recorded, settings: TrainerSettings, vocabulary: int) -> Selection:
    batch = recorded.batch
    memory = deepcopy(batch.memory_before)
    return select(
        recorded.groups,
        settings.batches,
        advantages=partial(advantages, settings.objective, memory=memory),
        current_version=batch.version,
        failed_versions=batch.failed_versions,
        vocabulary=vocabulary,
        routes=told_routes(settings),
    )


def _dealt(selection: Selection, mesh: DeviceMesh, budget: int) -> list[MicroBatch]:
    return pack(selection.rows, ranks=mesh.size(), budget=budget)[dist.get_rank()]
