"""What one optimizer step is made with: learner, coordinator, checkpoints and counters.

Every rank makes the same calls in the same order. Rank 0 alone has a coordinator and talks to
the store; what it finds out reaches the others through `run_on_rank_zero`. There are no endpoints
here: `trainer step` runs this as it is, `trainer serve` adds the weight push (`serve_worker`).

A step is committed only when its weights are on the disk, and a checkpoint is written while
training goes on: so a step stays *pending* until its checkpoint is whole. What is killed before
that is made again from the step before, of the same turns, which nobody else could lease.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tracegrad.events import Json
from tracegrad.store import LedgerError, Store, StoreError
from tracegrad.store.checkpoint_manifest import manifest_digest
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import (
    destroy_process_group,
    init_process_group,
    load_checkpoint,
    train_batch,
)
from tracegrad_trainer.engine.checkpoint.manifest import discard_checkpoint
from tracegrad_trainer.engine.checkpoint.save_load import CheckpointSaver
from tracegrad_trainer.engine.distributed import compute_dtype, take_peak_memory
from tracegrad_trainer.engine.peak_flops import peak_flops, throughput_metrics
from tracegrad_trainer.engine.random_state import seed_all
from tracegrad_trainer.engine.step.result import StepResult
from tracegrad_trainer.launch.run_state import RunState
from tracegrad_trainer.metrics import MetricSinks
from tracegrad_trainer.rl.build_learner import build_learner, model_vocab_size
from tracegrad_trainer.rl.committed_checkpoint import CommittedCheckpoint, base_model_of
from tracegrad_trainer.rl.coordinator import (
    Coordinator,
    LeasedBatch,
    RolloutSupply,
    describe_resume,
)
from tracegrad_trainer.utils.distributed import is_rank_zero, run_on_rank_zero
from tracegrad_trainer.utils.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

# What to do next: a batch is at hand; the pending step can be committed; nothing; end.
NextAction = Literal["train", "settle", "idle", "stop"]


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that was made and waits for its checkpoint."""

    step: int
    version: int
    metrics: Json
    folder: Path
    dropped_rows: tuple[int, ...]
    batch: LeasedBatch | None  # rank 0's
    parent: CommittedCheckpoint | None  # the weights that it began with; None: the model folder's


class TrainLoop:
    """One rank. Only rank 0 has a coordinator, a store and a state file."""

    def __init__(
        self,
        settings: TrainerSettings,
        stack: ExitStack,
        *,
        stopping: Callable[[], bool],
        supply: RolloutSupply | None = None,
    ) -> None:
        """Raises ValueError, StoreError: on the rank that meets it."""
        self.settings = settings
        self.stopping = stopping
        self.step = 0  # the last optimizer step that was made
        self.version = 0  # the policy version of the learner's weights
        # The last committed step's, or what was gone on from; None: the model folder's.
        self.parent: CommittedCheckpoint | None = None
        self.policy_moved = False  # by the last step; not where a value head alone learnt
        self.batch: LeasedBatch | None = None  # rank 0's; the others never see it whole
        self.pending: PendingStep | None = None
        self.watch = Stopwatch()
        mesh = init_process_group(settings.fsdp)
        stack.callback(destroy_process_group)
        seed_all(settings.seed + mesh.get_local_rank())
        self.coordinator: Coordinator | None = None
        self.store: Store | None = None
        self.state: RunState | None = None
        self.sinks = MetricSinks([])
        if is_rank_zero():
            self.state = RunState(settings.state_dir, "ranks")
            self.report_stage("starting")
            self.store = stack.enter_context(Store.open(settings.proxy.store))
            self.sinks = MetricSinks.open(settings.metrics, settings.state_dir)
            stack.callback(self.sinks.close)
        # Before it is read: who replaces it meanwhile is found out at the next start.
        self.base_model = None if self.store is None else base_model_of(settings)
        self.learner = build_learner(settings, mesh)
        if self.store is not None:
            if reason := self.learner.engine.head.reason:
                logger.info("full logits are made: %s", reason)
            self.coordinator = Coordinator(
                settings,
                self.store,
                stopping=stopping,
                supply=supply,
                vocabulary=model_vocab_size(self.learner.model),
            )
            stack.callback(lambda: self.leading.leases.close())
            stack.callback(self._release)
        self.saver = CheckpointSaver(settings.checkpoints)

    def report_stage(self, stage: str, **fields: object) -> None:
        if self.state is not None:
            self.state.update(stage=stage, **fields)

    def resume(self) -> None:
        """From the last committed step's checkpoint, if there is one."""
        point = run_on_rank_zero(lambda: self.leading.resume_point())
        if point.weights is not None:
            kept = load_checkpoint(self.learner, point.weights.folder, digest=point.weights.digest)
            self.parent = point.weights
            if self.coordinator is not None:
                self.coordinator.memory = kept["memory"]
        self.step, self.version = point.step, point.version
        self.report_stage("starting", begins=describe_resume(point, self.settings))
        self.watch.lap("start")

    @property
    def leading(self) -> Coordinator:
        """Rank 0's coordinator, on rank 0."""
        assert self.coordinator is not None
        return self.coordinator

    def next_action(self) -> NextAction:
        """What to do next; the same on every rank. With `train`, rank 0 has a batch at hand."""
        task = run_on_rank_zero(self._next)
        self.watch.lap("wait")
        return task

    def _next(self) -> NextAction:
        limit = self.settings.max_steps
        if self.stopping() or (limit is not None and self.step >= limit):
            return "stop"
        self.report_stage("waiting")
        self.batch = self.leading.next_batch(self.version, interrupted=self._written)
        if self.batch is not None:
            return "train"
        return "settle" if self._written() else "idle"

    def _written(self) -> bool:
        return self.pending is not None and not self.saver.busy

    def train_batch(self) -> bool:
        """The optimizer steps on the batch at hand; the checkpoint begins to be written.

        False: the step did not change the weights, and its batch was consumed as skipped.

        Raises:
            LedgerError: part of the batch is another's by now, or the step before it was refused;
                nothing of either is kept.
        """
        self.report_stage("training")
        done = train_batch(
            self.learner,
            self.batch.selection.rows if self.batch else None,
            version=self.version,
            budget=self.settings.batches.tokens_per_micro_batch,
            seed=self.settings.seed,
            share=self._share(),
        )
        self.watch.lap("train")
        if done.mismatch is not None:
            logger.warning(done.mismatch)
        if not done.applied:
            run_on_rank_zero(self._give_up)
            return False
        self.commit_pending()
        run_on_rank_zero(self._check)  # before anything of it is written or served
        # What is served already is not pushed again, and keeps its number: what it samples is
        # on-policy as before.
        self.policy_moved = done.policy_moved
        self.step, self.version = self.step + 1, self.version + self.policy_moved
        memory = self.coordinator.memory if self.coordinator is not None else {}
        counters = {"version": self.version, "memory": memory}
        parent = self.parent.as_parent() if self.parent and is_rank_zero() else None
        folder = self.saver.start(
            self.learner, self.step, counters, parent=parent, base=self.base_model
        )
        self.watch.lap("checkpoint")
        self.pending = PendingStep(
            self.step,
            self.version,
            done.metrics | self._speed(done) | {"seconds": self.watch.take()},
            folder,
            done.dropped,
            self.batch,
            self.parent,
        )
        self.batch = None
        return True

    def _share(self) -> float:
        """Rank 0's counts."""
        if self.batch is None:
            return 1.0
        return self.settings.step_share(self.batch.selection.stats["groups_trained"])

    def _check(self) -> None:
        assert self.batch is not None
        self.leading.check_leases(self.batch)

    def _speed(self, done: StepResult) -> dict[str, float]:
        seconds = self.watch.seconds.get("train", 0.0)
        peak = peak_flops(self.learner.device, compute_dtype(self.settings.fsdp))
        every = None if peak is None else peak * self.learner.mesh.size()
        speed = throughput_metrics(
            done.metrics["tokens"], seconds, flops=done.metrics["flops"], peak=every
        )
        memory = take_peak_memory(self.learner.device)
        return speed if memory is None else speed | {"memory_peak": float(memory)}

    def commit_pending(self) -> None:
        """Commits the step that is pending, if one is, when its checkpoint is whole.

        Raises:
            CheckpointError: it could not be written; the step is not committed.
            LedgerError: the ledger refused the step; its checkpoint is gone.
        """
        pending = self.pending
        if pending is None:
            return
        self.saver.wait()
        self.watch.lap("checkpoint")
        self.parent = run_on_rank_zero(lambda: self._commit(pending))
        self.pending = None
        # Only now: until here a restart would have gone on from the one before.
        policy = self.settings.checkpoint
        self.saver.prune(keep=policy.keep, keep_every=policy.keep_every)
        self.watch.lap("commit")

    def _commit(self, pending: PendingStep) -> CommittedCheckpoint:
        assert pending.batch is not None
        parent = pending.parent
        digest = manifest_digest(pending.folder)
        try:
            record = self.leading.commit(
                pending.batch,
                step=pending.step,
                version=pending.version,
                metrics=pending.metrics,
                checkpoint=str(pending.folder),
                dropped_rows=pending.dropped_rows,
                weights=parent.step if parent else 0,
                manifest_digest=digest,
                parent_digest=parent.digest if parent else None,
            )
        except LedgerError as error:
            discard_checkpoint(
                pending.folder
            )  # nobody may take it for the step's that has the number
            raise type(error)(
                f"{error}; this run's step {pending.step} is given up and its checkpoint removed:"
                " start again to go on from the last committed step, or give the run a store of"
                " its own (proxy.store)"
            ) from error
        self.sinks.step(record)
        return CommittedCheckpoint(pending.step, pending.folder, digest, record.run_id)

    def _give_up(self) -> None:
        assert self.batch is not None
        logger.warning("step skipped: loss or gradient is not finite")
        self.leading.discard_batch(self.batch, "non_finite_step")
        self.batch = None

    def _release(self) -> None:
        """What an error left untrained, or uncommitted, is free for the next start."""
        if self.coordinator is not None:
            pending = self.pending.batch if self.pending else None
            with suppress(StoreError):
                self.coordinator.release(self.batch, pending)
