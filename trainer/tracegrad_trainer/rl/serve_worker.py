"""The program of one FSDP rank; `trainer serve` starts it under torchrun.

Every rank runs the same loop: train on the batch that rank 0 leased, publish the weights while
their checkpoint is being written, let rank 0 commit the step with its turns, again.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

from tracegrad.events import Json
from tracegrad.store import PolicyVersion, Store
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import CheckpointError
from tracegrad_trainer.inference.control_routes import PushError
from tracegrad_trainer.inference.engine_config import check_engines
from tracegrad_trainer.inference.publish import PublishResult, WeightPublisher
from tracegrad_trainer.launch.run_state import ROLLED_BACK
from tracegrad_trainer.launch.workers import wanted_workers
from tracegrad_trainer.promotion.version_control import TrainingRolledBack, VersionControl
from tracegrad_trainer.rl.committed_checkpoint import checkpoint_of_step
from tracegrad_trainer.rl.own_launcher import (
    check_start,
    exit_code,
    is_own_launcher,
    journal,
    warn_of_absent_workers,
)
from tracegrad_trainer.rl.preflight import check_served_tokenizer
from tracegrad_trainer.rl.rank_main import StopFlag, run_rank
from tracegrad_trainer.rl.train_loop import TrainLoop
from tracegrad_trainer.utils.distributed import launch_rank, run_on_rank_zero
from tracegrad_trainer.utils.subprocesses import why_silent

# Run with -m, where __name__ is "__main__".
logger = logging.getLogger("tracegrad_trainer.rl.serve_worker")
# For so long the other ranks wait in one collective for what must answer.
PATIENCE_S = 5.0


class ServeWorker:
    """Training, and the weights of each of its steps served."""

    def __init__(
        self, settings: TrainerSettings, stack: ExitStack, stopping: Callable[[], bool]
    ) -> None:
        self.settings = settings
        self.stopping = stopping
        self.training = TrainLoop(settings, stack, stopping=stopping)
        self.control: VersionControl | None = None
        if self.training.store is not None:
            self.control = self._version_control(self.training.store)
        self.publisher = WeightPublisher(settings, self.training.learner, stack)
        if self.control is not None:
            self.publisher.await_room = self.control.await_room
            if self.publisher.pusher is not None:
                self.publisher.pusher.return_to_earlier_run(self.control.fetch_left_served)
            stack.callback(self.control.close)  # before the pusher is closed
        self.starts_again = False  # from a version that was returned to, once this run is over
        self.serves = False  # whether a push of ours is served
        self.failed_pushes = 0  # in a row

    def _version_control(self, store: Store) -> VersionControl:
        """Rank 0's."""
        settings, training = self.settings, self.training

        def check(step: int) -> None:
            checkpoint_of_step(store, settings, step)

        drift = training.leading.drift
        control = VersionControl(
            settings,
            store,
            run_id=training.leading.run_id,
            check_checkpoint=check,
            wanted=tuple if drift is None else drift.good_versions,
        )
        training.hold = control.hold
        training.leading.committing = control.committing
        return control

    def run(self) -> None:
        """Until `max_steps`, until rank 0 gets a signal to stop, or until an earlier version is
        returned to: then the ranks are to be started again."""
        try:
            self._run()
        except TrainingRolledBack as rollback:
            logger.warning("%s; the ranks start again from its checkpoint", rollback)
            with suppress(CheckpointError):
                self.training.pending.await_written()  # its threads may be in a collective
            self.training.report_stage(ROLLED_BACK, pending=[])
            self.starts_again = True
        else:
            self.training.report_stage("stopped")

    def _run(self) -> None:
        training = self.training
        run_on_rank_zero(self._act_before_start)
        training.resume()
        self._await_endpoints()
        run_on_rank_zero(self._check_endpoints)
        training.watch.lap("start")
        if self.control is not None and self.publisher.pusher is not None:
            self.control.start(self.publisher.pusher)
        self._publish()  # a broken path to the engine fails here, before anything is trained
        training.report_served(stepped=False)
        while (task := training.next_action()) != "stop":
            if task == "train":
                self._train()
            elif task == "commit":
                training.commit_saved()
            elif task == "save":
                training.save()
                run_on_rank_zero(self._keep)
        training.commit_pending()
        training.end_intake()

    def _train(self) -> None:
        """The batch at hand, and the push of what came of it."""
        with self.publisher.engine_stopped():
            stepped = self.training.train_batch()
            if stepped and self.training.policy_moved:
                self._publish()
        if stepped:
            self.training.report_served(stepped=True)

    def _check_endpoints(self) -> None:
        """Whether they are what we train for. Raises ValueError."""
        if not self.stopping():
            vllm = self.settings.vllm
            check_engines(vllm.urls, vllm, "vllm.urls")
            check_engines(self.settings.push.engines, vllm)
            check_served_tokenizer(self.settings)

    def _await_endpoints(self) -> None:
        """On all ranks, until vLLM and the proxy answer; `trainer serve` starts them again, and
        ends us if they cannot. They may take longer than a collective may last."""
        said: dict[str, str] = {}
        while not run_on_rank_zero(lambda: self._endpoints_answer(said)):
            pass

    def _endpoints_answer(self, said: dict[str, str]) -> bool:
        """Waits PATIENCE_S for it at most. `said`: why each did not, as the log has it."""
        deadline = time.monotonic() + PATIENCE_S
        first, *others = self.settings.engine_urls
        ours = first if self.settings.vllm.is_attached else "vLLM"
        probes = {
            ours: (first, "/health"),
            "the proxy": (self.settings.url, "/healthz"),
            **{url: (url, "/health") for url in others},
        }
        while not self.stopping():
            found = {name: why_silent(*probe) for name, probe in probes.items()}
            missing = {name: why for name, why in found.items() if why is not None}
            if not missing:
                break
            self.training.report_stage(f"waiting for {' and '.join(missing)}")
            for name, why in sorted(missing.items() - said.items()):
                logger.warning("waiting for %s at %s: %s", name, probes[name][0], why)
            said.update(missing)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def _publish(self) -> None:
        """Push and verify; a failed push is loud, leaves the old version, and may not recur.

        The step may not be committed yet. Should it be lost, the version's number is not used
        again, and what the version sampled stays trainable: its recorded log-probabilities are
        those of the weights that it had.
        """
        training = self.training
        # First: a vLLM that has ended meanwhile does not start before it finds its memory free.
        self.publisher.free_memory()
        self._await_endpoints()
        training.report_stage("pushing")
        if training.trained_rows:
            self._record("pushing", {})
        tried = run_on_rank_zero(self._is_candidate)
        published = self.publisher.publish(
            training.version, training.trained_rows, as_candidate=tried
        )
        error, lost = run_on_rank_zero(lambda: self._record_push_result(published))
        training.watch.lap("push")
        run_on_rank_zero(self._check_control)
        if error is None:
            self.failed_pushes = 0
            self.serves = True
            return
        self.failed_pushes += 1
        # Before the first push vLLM has the model folder's weights, which nobody trained last.
        limit = self.settings.push.failures_in_a_row
        if lost or not self.serves or self.failed_pushes >= limit:
            training.commit_pending()  # what was trained is not lost with the engine
            raise PushError(error)

    def _record_push_result(self, published: PublishResult | None) -> tuple[str | None, bool]:
        """Rank 0: the version and what came of it, in the store; the error, if there was one,
        and whether the engine is lost by it."""
        assert published is not None
        if published.error is not None:
            logger.warning("push failed: %s", published.error)
        if published.superseded:
            self._record("superseded", published.detail())
        else:
            detail = published.detail() | {"base": self.training.base_model}
            self._record("serving" if published.error is None else "failed", detail)
        if published.error is None:
            self._keep()
        return published.error, published.lost

    def _keep(self) -> None:
        """Rank 0: the weights that are served are kept on disk."""
        assert self.control is not None
        assert self.publisher.pusher is not None
        training, weights = self.training, self.training.pending.last
        if self.publisher.pusher.newest.version != training.version:
            return  # its push failed
        self.control.was_served(
            training.version,
            training.step or None,
            weights,
            has_checkpoint=training.pending.has_checkpoint(weights),
        )

    def _act_before_start(self) -> None:
        """Rank 0."""
        if self.control is not None:
            self.control.act_before_start()

    def _is_candidate(self) -> bool:
        """Rank 0."""
        return self.control is not None and self.control.is_candidate(self.training.pending.last)

    def _check_control(self) -> None:
        """Rank 0."""
        if self.control is not None:
            self.control.check()

    def _record(
        self, state: Literal["pushing", "serving", "failed", "superseded"], detail: Json
    ) -> None:
        training = self.training
        assert training.store is not None
        detail = detail | {
            "weights_step": training.pending.last,
            "gate": self.settings.promotion.gate,
        }
        version = PolicyVersion(
            version=training.version, step=training.step or None, state=state, detail=detail
        )
        training.store.record_version(version)
        if state != "pushing":
            training.sinks.pushed(version)


class ServeRank:
    """One rank's run, by the settings in `settings_file`."""

    def __init__(self, settings_file: Path) -> None:
        self.settings_file = settings_file
        self.starts_again = False

    def run(self, settings: TrainerSettings, stack: ExitStack, stop: StopFlag) -> None:
        by_hand = is_own_launcher(settings, self.settings_file)
        if by_hand and launch_rank() == 0:
            check_start(settings)
        worker = ServeWorker(settings, stack, stop)
        if by_hand and worker.training.store is not None:
            stack.enter_context(journal(settings, worker.training.store))
            warn_of_absent_workers(settings, self.settings_file)
            worker.training.report_stage("starting", workers=wanted_workers(settings))
        worker.run()
        self.starts_again = worker.starts_again


def main(arguments: list[str]) -> int:
    """`python -m tracegrad_trainer.rl.serve_worker SETTINGS`, JSON or TOML, under torchrun."""
    rank = ServeRank(Path(arguments[0]))
    return run_rank(arguments[0], rank.run) or exit_code(starts_again=rank.starts_again)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
