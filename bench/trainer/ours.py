"""tracegrad's training engine, with one rank."""

from __future__ import annotations

import torch

from bench.trainer.rollouts import VERSION
from bench.trainer.work import BETAS, LR, MAX_NORM, OBJECTIVE, OURS, Peer, Work
from tracegrad_trainer.batches import BatchSettings, Row, pack, select
from tracegrad_trainer.engine import (
    FsdpSettings,
    Learner,
    OptimSettings,
    build_model,
    init_process_group,
    shard,
)
from tracegrad_trainer.losses import compute_advantages


class Ours(Peer):
    name = OURS

    def __init__(self, work: Work) -> None:
        self.work = work
        self.rows = rows(work)
        # The model fits whole: what one would set then.
        settings = FsdpSettings(device="cpu", reshard=False, threads=torch.get_num_threads())
        mesh = init_process_group(settings)
        self.model = shard(build_model(work.folder, settings), mesh, settings)
        optim = OptimSettings(lr=LR, betas=BETAS, max_grad_norm=MAX_NORM)
        self.learner = Learner(self.model, mesh, OBJECTIVE, optim, reshard=settings.reshard)
        self.optimizer = self.learner.optimizer

    def step(self) -> float:
        [micro_batches] = pack(self.rows, ranks=1, budget=self.work.budget)
        result = self.learner.train(micro_batches, version=VERSION)
        assert result.applied
        return result.metrics["loss"]


def rows(work: Work) -> list[Row]:
    settings = BatchSettings(tokens_per_micro_batch=work.budget)
    selection = select(
        work.tasks,
        settings,
        advantages=lambda rollouts: compute_advantages(OBJECTIVE, rollouts, {}),
        current_version=VERSION,
    )
    assert not selection.skipped
    assert sum(len(row) for row in selection.rows) == work.tokens
    return selection.rows
