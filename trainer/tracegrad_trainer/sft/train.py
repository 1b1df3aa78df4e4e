"""`trainer sft`, the program of one rank: learns from stored traces, without agents or vLLM.

    python -m tracegrad_trainer.sft.train RUN.json                         # one rank
    torchrun --nproc-per-node 2 -m tracegrad_trainer.sft.train RUN.json    # two

`RUN.json` is an `SftSettings`. Rank 0 reads the store and decides what each step is made of;
nothing there is leased or changed. A run's folder is named after its data and settings: the same
command again goes on where the one before was stopped or killed, and ends with the same weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from tracegrad.store import Store
from tracegrad_trainer.batches import Row, mismatched_rows
from tracegrad_trainer.engine import (
    OptimSettings,
    destroy_process_group,
    init_process_group,
    list_checkpoints,
    load_checkpoint,
    train_batch,
)
from tracegrad_trainer.engine.checkpoint.hf_export import save_hf
from tracegrad_trainer.engine.checkpoint.save_load import CheckpointSaver
from tracegrad_trainer.engine.model import lora
from tracegrad_trainer.engine.random_state import seed_all
from tracegrad_trainer.launch.folder_lock import lock_for_ranks
from tracegrad_trainer.metrics import MetricSinks
from tracegrad_trainer.rl.build_learner import build_learner, folder_vocab_size
from tracegrad_trainer.rl.preflight import check_memory
from tracegrad_trainer.rl.rank_main import StopFlag, run_as_rank, search_working_folder
from tracegrad_trainer.sft.config import SftSettings
from tracegrad_trainer.sft.dataset import choose_examples
from tracegrad_trainer.sft.evaluate import evaluate_held_out
from tracegrad_trainer.sft.report import SftReport
from tracegrad_trainer.sft.schedule import SftData, build_data, data_digest, plan_epoch
from tracegrad_trainer.sft.tokenize import load_reply_tokenizer
from tracegrad_trainer.utils.distributed import is_rank_zero, launch_rank, run_on_rank_zero


@dataclass(frozen=True, slots=True)
class RunOutline:
    """What every rank has to know of rank 0's data."""

    folder: Path
    steps: list[int]  # of each epoch
    held_out: bool
    checkpoint: Path | None


def prepare_data(settings: SftSettings) -> SftData:
    """What is learnt and what is measured. Raises StoreError, ValueError."""
    trainer = settings.trainer
    with Store.open(trainer.proxy.store, create=False) as store:
        chosen = choose_examples(
            store,
            settings.rollout_filter,
            writer=partial(load_reply_tokenizer, trainer.model),
            compared=settings.compares_rollouts,
            mask_errors=settings.mask_errors,
            mask=settings.mask,
        )
    return build_data(chosen, settings, vocabulary=folder_vocab_size(trainer.model))


class SftTrainer:
    """One rank's part. Only rank 0 has data and a report."""

    def __init__(self, settings: SftSettings, stack: ExitStack, stop: Callable[[], bool]) -> None:
        """Raises StoreError, ValueError: before a model is loaded, where that shows already."""
        self.settings = settings
        self.stop = stop
        self.data: SftData | None = None
        self.report: SftReport | None = None
        trainer = settings.trainer
        mesh = init_process_group(trainer.fsdp)
        stack.callback(destroy_process_group)
        seed_all(trainer.seed + dist.get_rank())
        self.outline = run_on_rank_zero(lambda: self._prepare(stack))
        self.learner = build_learner(trainer, mesh, self._optim())
        self.saver = CheckpointSaver(self.outline.folder / "checkpoints")

    def _prepare(self, stack: ExitStack) -> RunOutline:
        settings = self.settings
        check_memory(settings.trainer)
        self.data = data = prepare_data(settings)
        folder = settings.run_folder / data_digest(data, settings)
        sinks = MetricSinks.open(settings.trainer.metrics, settings.trainer.state_dir)
        stack.callback(sinks.close)
        self.report = SftReport(folder, settings.progress_file, sinks)
        self.report.run_started(data, folder)
        kept = list_checkpoints(folder / "checkpoints")
        return RunOutline(
            folder=folder,
            steps=[len(self._plan(epoch)) for epoch in range(settings.epochs)],
            held_out=bool(data.held_out),
            checkpoint=kept[-1] if kept else None,
        )

    def _plan(self, epoch: int) -> list[list[int]]:
        assert self.data is not None
        sizes = [unit.tokens for unit in self.data.train]
        seed = self.settings.trainer.seed
        return plan_epoch(sizes, self.settings.tokens_per_step, seed=seed, epoch=epoch)

    def _optim(self) -> OptimSettings:
        """The learning rate decays over the whole run, unless a schedule is set."""
        optim = self.settings.trainer.optim
        if self.settings.decay == "constant" or optim.schedule != "constant":
            return optim
        steps = max(sum(self.outline.steps), optim.warmup_steps + 1)
        return optim.model_copy(update={"schedule": self.settings.decay, "decay_steps": steps})

    def run(self) -> None:
        """All epochs, from where an earlier run of the same ended."""
        out = self.settings.out or self.outline.folder / "model"
        taken = self._resume()
        if taken == 0 and self.outline.held_out:
            self._measure(0, 0)
        for epoch, count in enumerate(self.outline.steps):
            first = sum(self.outline.steps[:epoch])
            plan = self._plan(epoch) if is_rank_zero() else None
            for number in range(max(taken - first, 0), count):
                if run_on_rank_zero(self.stop):
                    self._save(taken)
                    self.saver.wait()
                    self._say(partial(SftReport.stopped, taken=taken))
                    return
                self._step(epoch, first + number, None if plan is None else plan[number])
                taken = first + number + 1
                if number == count - 1 and self.outline.held_out:
                    self._measure(epoch + 1, taken)
                if number == count - 1 or taken % self.settings.save_every == 0:
                    self._save(taken)
        self.saver.wait()
        if self.settings.trainer.fsdp.lora is not None:
            lora.save_adapter(self.learner.model, out)
        else:
            save_hf(self.learner.model, out, companions_from=self.settings.trainer.model)
        self._say(lambda report: report.run_ended(out))

    def _resume(self) -> int:
        """Steps taken, whether they changed the weights or not."""
        if self.outline.checkpoint is None:
            taken = 0
        else:
            taken = load_checkpoint(self.learner, self.outline.checkpoint)["taken"]
        self._say(lambda report: report.run_resumed(taken))
        return taken

    def _step(self, epoch: int, number: int, units: list[int] | None) -> None:
        trainer = self.settings.trainer
        budget = trainer.batches.tokens_per_micro_batch
        rows: list[Row] | None = None
        others: list[Row] = []
        if units is not None:
            assert self.data is not None
            rows = [row for unit in units for row in self.data.train[unit].rows]
            if "kto_z" in trainer.objective.needs:
                others = mismatched_rows(rows, limit=budget)
        done = train_batch(self.learner, rows, version=0, budget=budget, mismatched=others)
        self._say(lambda report: report.step_taken(epoch + 1, number + 1, done))

    def _measure(self, epoch: int, taken: int) -> None:
        rows = None
        if self.data is not None:
            rows = [row for unit in self.data.held_out for row in unit.rows]
        budget = self.settings.trainer.batches.tokens_per_micro_batch
        found = evaluate_held_out(self.learner, rows, self.settings.preset, budget=budget)
        self._say(lambda report: report.evaluated(epoch, taken, found))

    def _save(self, taken: int) -> None:
        self.saver.wait()
        self.saver.prune(keep=self.settings.trainer.checkpoint.keep)
        self.saver.start(self.learner, taken, {"taken": taken})

    def _say(self, what: Callable[[SftReport], None]) -> None:
        if self.report is not None:
            what(self.report)


def main(arguments: list[str]) -> int:
    """0: the model is written, or it was asked to stop; 1: it failed, and one line says why."""
    search_working_folder()
    settings = SftSettings.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))

    def work(stack: ExitStack, stop: StopFlag) -> None:
        if launch_rank() == 0:
            stack.enter_context(lock_for_ranks(settings.trainer.state_dir))
        SftTrainer(settings, stack, stop).run()

    return run_as_rank(work, failed=SftReport(settings.run_folder, settings.progress_file).failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
