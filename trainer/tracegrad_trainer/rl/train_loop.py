"""What one optimizer step is made with: learner, coordinator, checkpoints and counters.

Every rank makes the same calls in the same order. Rank 0 alone has a coordinator and talks to
the store; what it finds out reaches the others through `run_on_rank_zero`. There are no endpoints
here: `trainer step` runs this as it is, `trainer serve` adds the weight push (`serve_worker`).

A step is committed only when a checkpoint has it, and that is written while training goes on: until
then it is *pending* (`pending_steps`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Literal

import torch.distributed as dist

from tracegrad.events import Json
from tracegrad.host_memory import return_freed_memory
from tracegrad.store import Store, StoreError, StoreLost
from tracegrad_trainer.batches import Row
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import (
    destroy_process_group,
    init_process_group,
    load_checkpoint,
    train_batch,
)
from tracegrad_trainer.engine.distributed import (
    compute_dtype,
    release_cached_memory,
    take_peak_memory,
)
from tracegrad_trainer.engine.peak_flops import peak_flops, throughput_metrics
from tracegrad_trainer.engine.random_state import seed_all
from tracegrad_trainer.engine.step.optimizer import clear_momentum
from tracegrad_trainer.engine.step.result import StepResult
from tracegrad_trainer.launch.run_state import RunState
from tracegrad_trainer.metrics import MetricSinks
from tracegrad_trainer.rl.build_learner import build_learner, model_vocab_size
from tracegrad_trainer.rl.committed_checkpoint import base_model_of
from tracegrad_trainer.rl.coordinator import (
    Coordinator,
    LeasedBatch,
    RolloutSupply,
    describe_resume,
    without_turns,
)
from tracegrad_trainer.rl.pending_steps import PendingStep, PendingSteps
from tracegrad_trainer.utils.distributed import (
    check_same_settings,
    check_shared_folder,
    is_rank_zero,
    run_on_rank_zero,
)
from tracegrad_trainer.utils.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

# What to do next: a batch is at hand; a checkpoint is whole, and its steps can be committed; steps
# without one wait for long; nothing; end.
NextAction = Literal["train", "commit", "save", "idle", "stop"]
# While training is held nothing is leased; ranks look again after so long, in seconds.
HELD_POLL_S = 0.2

_STORE_POLL_S = 1.0


def _of_every_rank(settings: TrainerSettings) -> Json:
    """What each computes with. The rest is rank 0's alone, or is another on another host (paths,
    GPUs, threads)."""
    tables = {"seed", "batches", "objective", "optim", "fsdp", "checkpoint"}
    found = settings.model_dump(mode="json", include=tables)
    found["fsdp"].pop("threads")
    return found


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
        self.policy_moved = False  # by the last step; not where a value head alone learnt
        self.batch: LeasedBatch | None = None  # rank 0's; the others never see it whole
        self.trained_rows: Sequence[Row] = ()  # of the last step; rank 0's
        self.watch = Stopwatch()
        # Rank 0's: why nothing may be leased now. Raises StopAllRanks where the run is to end.
        self.hold: Callable[[], str | None] = lambda: None
        self._was_held = False
        self._momentum_cleared = False
        mesh = init_process_group(settings.fsdp)
        stack.callback(destroy_process_group)
        check_shared_folder(settings.state_dir, "state_dir")  # each writes its part of checkpoints
        check_same_settings(_of_every_rank(settings))
        seed_all(settings.seed + dist.get_rank())
        self.coordinator: Coordinator | None = None
        self.store: Store | None = None
        self.state: RunState | None = None
        self.sinks = MetricSinks([])
        if is_rank_zero():
            self.state = RunState(settings.state_dir, "ranks")
            self.report_stage("starting")
            self.store = stack.enter_context(self._open_store())
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
            stack.callback(lambda: self.leading.close())
        self.pending = PendingSteps(settings, self.coordinator, self.sinks)
        if self.store is not None:
            self.pending.protected = self.store.kept_steps
        stack.callback(self._release)

    def _open_store(self) -> Store:
        """Once its server answers; who started us found that it does. Raises StoreError."""
        while True:
            try:
                return Store.open(self.settings.proxy.store)
            except StoreLost as error:
                if self.stopping():
                    raise
                logger.warning("waiting for the store: %s", error)
                self.report_stage("waiting for the store")
            time.sleep(_STORE_POLL_S)

    def report_stage(self, stage: str, **fields: object) -> None:
        if self.state is not None:
            selection = {} if self.coordinator is None else self.coordinator.selection.report()
            self.state.update(stage=stage, **selection, **fields)

    def resume(self) -> None:
        """From the last committed step's checkpoint, if there is one."""
        point = run_on_rank_zero(lambda: self.leading.resume_point())
        if point.weights is not None:
            kept = load_checkpoint(self.learner, point.weights.folder, digest=point.weights.digest)
            self.pending.parent = point.weights
            if self.coordinator is not None:
                self.coordinator.restore_counters(kept)
            if point.rolled_back:
                # It points where training went that was given up: AdamW would go there for some
                # ten steps more, whatever the rewards are now.
                clear_momentum(self.learner.optimizer)
            self._momentum_cleared = point.rolled_back
        # Of loading, and of forwards that tried the model: a vLLM may start beside it.
        release_cached_memory(self.learner.device)
        self.step, self.version = point.step, point.version
        self._report_hold(False)
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
        if (reason := self.leading.guard_hold() or self.hold()) is not None:
            if not self._was_held:
                self._report_hold(True)
            return self._held(reason)
        if self._was_held:
            self.leading.let_go_on()
            self._report_hold(False)
        self.report_stage("waiting")
        self.batch = self.leading.next_batch(
            self.version, interrupted=lambda: self.pending.is_written or self.hold() is not None
        )
        if self.batch is not None:
            return "train"
        return self._without_batch()

    def _report_hold(self, is_held: bool) -> None:
        """Rank 0's, to who scrapes its metrics."""
        if self.store is not None:
            self.sinks.report_hold(is_held, self.store.count_decisions)
        self._was_held = is_held

    def _held(self, reason: str) -> NextAction:
        """What was leased for a batch is given back; what was made is committed."""
        self.report_stage("held", held=reason)
        self.leading.release_held()
        found = self._without_batch()
        if found == "idle":
            time.sleep(HELD_POLL_S)
        return found

    def _without_batch(self) -> NextAction:
        if self.pending.is_written:
            return "commit"
        return "save" if self.pending.is_idle else "idle"

    def train_batch(self) -> bool:
        """The optimizer steps on the batch at hand; a checkpoint begins to be written, if one is
        due.

        False: the step did not change the weights, and its batch was consumed as skipped.

        Raises:
            LedgerError: part of the batch is another's by now, or a step before it was refused;
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
        due, written = run_on_rank_zero(
            lambda: (self.pending.is_due(more=1), self.pending.is_written)
        )
        if due or written:
            self.commit_saved()
        run_on_rank_zero(self._check)  # before anything of it is written or served
        # What is served already is not pushed again, and keeps its number: what it samples is
        # on-policy as before.
        self.policy_moved = done.policy_moved
        self.step, self.version = self.step + 1, self.version + self.policy_moved
        if due:
            self._save()
        self.pending.add(self._pending_step(done))
        self.trained_rows = () if self.batch is None else self.batch.selection.rows
        self.batch = None
        return_freed_memory()  # of activations, whose sizes differ from batch to batch
        self._report_pending()
        return True

    def _pending_step(self, done: StepResult) -> PendingStep:
        if self.batch is None:
            return PendingStep(self.step)
        made = self.leading.record(
            self.batch,
            step=self.step,
            version=self.version,
            metrics=done.metrics | self._speed(done) | {"seconds": self.watch.take()},
            dropped_rows=done.dropped,
            weights=self.pending.last,
            packing=self.learner.engine.packing,
            momentum_cleared=self._momentum_cleared,
        )
        self._momentum_cleared = False
        return PendingStep(self.step, made, without_turns(self.batch.groups))

    def _share(self) -> float:
        """Rank 0's counts."""
        if self.batch is None:
            return 1.0
        return self.settings.step_share(self.batch.selection.stats["groups_trained"])

    def _check(self) -> None:
        assert self.batch is not None
        self.hold()  # a step that is made is kept, unless the run is to end
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

    def save(self) -> None:
        """Begins the checkpoint of the steps that none has yet."""
        self.report_stage("saving")
        self._save()

    def report_served(self, *, stepped: bool) -> None:
        """To drivers: the learner's weights are served, so that more rollouts may be opened."""

        def report() -> None:
            self.leading.report_served(self.version, self.pending.groups, stepped=stepped)

        run_on_rank_zero(report)

    def end_intake(self) -> None:
        """Drivers are held back no more: training ends well."""

        def withdraw() -> None:
            if self.leading.intake is not None:
                self.leading.intake.withdraw()

        run_on_rank_zero(withdraw)

    def commit_pending(self) -> None:
        """Commits every step that was made, once a checkpoint has it.

        Raises:
            CheckpointError: it could not be written; its steps are not committed.
            LedgerError: the ledger refused a step; the checkpoint is gone.
        """
        self.commit_saved()
        if len(self.pending):
            self.save()
            self.commit_saved()

    def _save(self) -> None:
        counters = {} if self.coordinator is None else self.coordinator.counters(self.version)
        self.pending.save(self.learner, self.step, counters, self.base_model)
        self.watch.lap("checkpoint")

    def commit_saved(self) -> None:
        """Commits the steps of the checkpoint that is being written, when it is whole."""
        self.pending.await_written()
        self.watch.lap("checkpoint")
        self.pending.commit_saved()
        self._report_pending()
        self._report_hold(self._was_held)  # somebody may have decided meanwhile
        self.watch.lap("commit")

    def _report_pending(self) -> None:
        """For `trainer status`, and for who ends this process."""
        if self.state is not None:
            self.state.update(pending=self.pending.numbers)

    def _give_up(self) -> None:
        assert self.batch is not None
        logger.warning("step skipped: loss or gradient is not finite")
        self.leading.discard_batch(self.batch, "non_finite_step")
        self.batch = None

    def _release(self) -> None:
        """What an error left untrained, or uncommitted, is free for the next start."""
        if self.coordinator is not None:
            groups = self.pending.groups + (self.batch.groups if self.batch else [])
            with suppress(StoreError):
                self.coordinator.release(groups)
