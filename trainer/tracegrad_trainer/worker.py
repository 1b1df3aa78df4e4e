"""The program of one FSDP rank; `trainer serve` starts it under torch.distributed's launcher.

Every rank runs the same loop: train on the batch that rank 0 leased, save a checkpoint, let
rank 0 commit the step with its turns, publish the weights, again. Rank 0 alone talks to the
store, the proxy and vLLM; what it finds out reaches the others through `ranks.decide`.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from tracegrad.records import Json
from tracegrad.store import PolicyVersion, Store, StoreError
from tracegrad_trainer.children import answers
from tracegrad_trainer.coordinator import Batch, Coordinator, ResumePoint
from tracegrad_trainer.endpoint.push import PushFailed
from tracegrad_trainer.fsdp import (
    CheckpointError,
    Learner,
    build_model,
    load_checkpoint,
    save_checkpoint,
    shard,
    start_ranks,
    stop_ranks,
    train_batch,
)
from tracegrad_trainer.publisher import Published, Publisher
from tracegrad_trainer.ranks import RankZeroError, decide, leads
from tracegrad_trainer.run_state import RunState
from tracegrad_trainer.settings import TrainerSettings
from tracegrad_trainer.stopwatch import Stopwatch

PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Counters:
    """Where training stands; the same on every rank."""

    step: int = 0  # the last optimizer step that was committed
    version: int = 0  # the policy version of the trainer's weights
    failed_pushes: int = 0  # in a row


class Worker:
    """One rank. Only rank 0 has a coordinator, a store and a state file."""

    def __init__(self, settings: TrainerSettings, stack: ExitStack) -> None:
        self.settings = settings
        self.counters = Counters()
        self.watch = Stopwatch()
        self.stopping = False
        self.serves = False  # whether a push of ours is served
        self.batch: Batch | None = None  # rank 0's; the others never see it whole
        mesh = start_ranks(settings.fsdp)
        stack.callback(stop_ranks)
        self.learner = Learner(
            shard(build_model(settings.model, settings.fsdp), mesh, settings.fsdp),
            mesh,
            settings.objective,
            settings.optim,
            reshard=settings.fsdp.reshard,
        )
        self.coordinator: Coordinator | None = None
        self.store: Store | None = None
        self.state: RunState | None = None
        if leads():
            self.state = RunState(settings.state_dir, "ranks")
            self.say("starting")
            self.store = stack.enter_context(Store.open(settings.proxy.store))
            self.coordinator = Coordinator(settings, self.store, stopping=lambda: self.stopping)
            stack.callback(self._release)
        self.publisher = Publisher(settings, self.learner, stack)

    def run(self) -> None:
        """Until `max_steps`, or until rank 0 is told to stop."""
        self._resume()
        decide(self._await_endpoints)
        self.watch.lap("start")
        self._publish()  # a broken path to the engine fails here, before anything is trained
        while (task := decide(self._next)) != "stop":
            if task == "train":
                self._step()

    def say(self, stage: str, **fields: object) -> None:
        if self.state is not None:
            self.state.update(stage=stage, **fields)

    def _resume(self) -> None:
        """From the last committed step's checkpoint, if there is one."""
        point = decide(self._resume_point)
        if point.checkpoint is not None:
            load_checkpoint(self.learner, point.checkpoint)
        self.counters = Counters(step=point.step, version=point.version)

    def _resume_point(self) -> ResumePoint:
        assert self.coordinator is not None
        return self.coordinator.resume_point()

    def _await_endpoints(self) -> None:
        """Until vLLM and the proxy answer; `trainer serve` ends us if one of them cannot."""
        urls = [f"{self.settings.vllm.url}/health", f"{self.settings.url}/healthz"]
        while not self.stopping and not all(answers(url) for url in urls):
            time.sleep(0.2)

    def _next(self) -> str:
        """Rank 0: `train` with a batch at hand, `idle`, or `stop`."""
        assert self.coordinator is not None
        limit = self.settings.max_steps
        if self.stopping or (limit is not None and self.counters.step >= limit):
            return "stop"
        self.say("waiting")
        self.batch = self.coordinator.next_batch(self.counters.version)
        self.watch.lap("wait")
        return "idle" if self.batch is None else "train"

    def _step(self) -> None:
        """Train, checkpoint, commit, publish: in this order, so that a crash loses no update.

        A step is committed only when its weights are on the disk; weights are served only when
        their step is committed.
        """
        self.say("training")
        done = train_batch(
            self.learner,
            self.batch.selection.rows if self.batch else None,
            version=self.counters.version,
            budget=self.settings.batches.tokens_per_micro_batch,
        )
        self.watch.lap("train")
        if not done.applied:
            decide(lambda: self._give_up("non_finite_step"))
            return
        step, version = self.counters.step + 1, self.counters.version + 1
        folder = save_checkpoint(
            self.learner,
            self.settings.state_dir / "checkpoints",
            step,
            {"version": version},
            keep=self.settings.checkpoint.keep,
        )
        self.watch.lap("checkpoint")
        decide(lambda: self._commit(step, version, done.metrics, folder, done.dropped))
        self.watch.lap("commit")
        self.counters.step, self.counters.version = step, version
        self._publish()

    def _commit(
        self, step: int, version: int, metrics: Json, folder: Path, dropped: tuple[int, ...]
    ) -> None:
        assert self.coordinator is not None
        assert self.batch is not None
        self.coordinator.commit(
            self.batch,
            step=step,
            version=version,
            metrics=metrics | {"seconds": self.watch.take()},
            checkpoint=str(folder),
            dropped_rows=dropped,
        )

    def _give_up(self, reason: str) -> None:
        assert self.coordinator is not None
        assert self.batch is not None
        self.coordinator.give_up(self.batch, reason)
        self.batch = None

    def _publish(self) -> None:
        """Push and verify; a failed push is loud, leaves the old version, and may not recur."""
        self.say("pushing")
        rows = self.batch.selection.rows if self.batch else []
        published = self.publisher.publish(self.counters.version, rows)
        error, lost = decide(lambda: self._record(published))
        self.batch = None
        self.watch.lap("push")
        if error is None:
            self.counters.failed_pushes = 0
            self.serves = True
            return
        self.counters.failed_pushes += 1
        # Before the first push vLLM has the model folder's weights, which nobody trained last.
        if (
            lost
            or not self.serves
            or self.counters.failed_pushes >= self.settings.push.failures_in_a_row
        ):
            raise PushFailed(error)

    def _record(self, published: Published | None) -> tuple[str | None, bool]:
        """Rank 0: the version and what came of it, in the store; the error, if there was one,
        and whether the engine is lost by it."""
        assert self.store is not None
        assert published is not None
        if published.error is not None:
            print(f"push failed: {published.error}", file=sys.stderr, flush=True)
        self.store.record_version(
            PolicyVersion(
                version=published.version,
                step=self.counters.step or None,
                state="serving" if published.error is None else "failed",
                detail=published.detail(),
            )
        )
        return published.error, published.lost

    def _release(self) -> None:
        """A batch that an error left untrained is free for the next start."""
        if self.coordinator is not None and self.batch is not None:
            with suppress(StoreError):
                self.coordinator.ledger.release(self.batch.groups)


def main(arguments: list[str]) -> int:
    """`python -m tracegrad_trainer.worker SETTINGS.json`, under torch.distributed's launcher."""
    # The launcher may be killed; a rank that waits in a collective would notice neither that nor
    # a SIGTERM, whose handler Python runs only when the collective is over.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    settings = TrainerSettings.model_validate_json(Path(arguments[0]).read_text())
    torch.manual_seed(settings.seed)
    worker: Worker | None = None
    try:
        with ExitStack() as stack:
            worker = Worker(settings, stack)

            def stop(number: int, frame: FrameType | None) -> None:
                worker.stopping = True

            signal.signal(signal.SIGTERM, stop)
            worker.run()
            worker.say("stopped")
    except RankZeroError:
        return 1  # rank 0 says why
    except (CheckpointError, PushFailed, StoreError, ValueError, OSError) as error:
        line = f"{type(error).__name__}: {error}"
        print(line, file=sys.stderr, flush=True)
        if worker is not None:
            worker.say("failed", error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
