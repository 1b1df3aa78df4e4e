"""How a model does on what was held out: a forward, and nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tracegrad_trainer.batches import MicroBatch, Row
from tracegrad_trainer.fsdp import Learner
from tracegrad_trainer.fsdp.prepass import reference_logprobs
from tracegrad_trainer.fsdp.ranks import deal

from .sft_settings import Preset


@dataclass(frozen=True, slots=True)
class Measured:
    """`loss` as in training. `accuracy` is the share that the model has right: of tokens, what it
    says when it samples at temperature 1 (their mean probability); of pairs, those whose better
    side it prefers more than the reference does; of labelled rows, those that it finds more
    (chosen) or less (rejected) likely than the reference does."""

    loss: float
    accuracy: float


def measure(
    learner: Learner, rows: Sequence[Row] | None, preset: Preset, *, budget: int
) -> Measured:
    """Of rank 0's `rows` (None on the others); every rank calls, and all learn the same."""
    batches, _ = deal(rows, budget=budget)
    now = learner.logprobs(batches)
    before = now if preset == "sft" else _reference(learner, batches)
    total = torch.zeros(3, dtype=torch.float64)  # loss, right, how many
    for batch, logp, reference in zip(batches, now, before, strict=True):
        total += _sums(batch, logp.double().cpu(), reference.double().cpu(), preset, learner)
    dist.all_reduce(total, dist.ReduceOp.SUM)
    loss, right, count = total.tolist()
    return Measured(loss / max(count, 1.0), right / max(count, 1.0))


@torch.no_grad()
def _reference(learner: Learner, batches: Sequence[MicroBatch]) -> list[Tensor]:
    found = reference_logprobs(learner.engine, learner.engine.inputs(batches))
    learner.engine.rest()
    return found


def _sums(
    batch: MicroBatch, logp: Tensor, reference: Tensor, preset: Preset, learner: Learner
) -> Tensor:
    if preset == "sft":
        return torch.stack([-logp.sum(), logp.exp().sum(), torch.tensor(len(logp)).double()])
    rows = torch.from_numpy(batch.row)
    gain = torch.zeros(len(batch.row_lengths), dtype=torch.float64)
    gain.index_add_(0, rows, logp - reference)
    label = torch.from_numpy(batch.label).double()
    beta = learner.objective.beta
    if preset == "kto":
        held = label != 0
        # Without z, which is of a training batch: the loss around 0.
        loss = 1 - torch.sigmoid(beta * label * gain)
        right = label * gain > 0
        return torch.stack([loss[held].sum(), right[held].sum().double(), held.sum().double()])
    pairs, of_row = torch.unique(torch.from_numpy(batch.pair), return_inverse=True)
    margin = torch.zeros(len(pairs), dtype=torch.float64).index_add_(0, of_row, label * gain)
    margin = margin[pairs >= 0]
    return torch.stack(
        [
            -F.logsigmoid(beta * margin).sum(),
            (margin > 0).sum().double(),
            torch.tensor(len(margin)).double(),
        ]
    )
