"""How a model does on what was held out: a forward, and nothing is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tracegrad_trainer.batches import MicroBatch, Row
from tracegrad_trainer.engine import Learner
from tracegrad_trainer.engine.step.prepass import reference_logprobs
from tracegrad_trainer.engine.step.train_batch import deal_rows
from tracegrad_trainer.sft.config import Preset


@dataclass(frozen=True, slots=True)
class EvalResult:
    """`loss` as in training. `accuracy` is the share that the model has right: of tokens, their
    mean probability (what it samples at temperature 1); of pairs, those whose better
    side it prefers more than the reference does; of labelled rollouts, those that it finds more
    (chosen) or less (rejected) likely than the reference does."""

    loss: float
    accuracy: float


def evaluate_held_out(
    learner: Learner, rows: Sequence[Row] | None, preset: Preset, *, budget: int
) -> EvalResult:
    """Of rank 0's `rows` (None on the others); every rank calls, and all learn the same."""
    batches, _ = deal_rows(learner.engine, rows, budget=budget)
    now = learner.logprobs(batches)
    before = now if preset == "sft" else _reference(learner, batches)
    total = torch.zeros(3, dtype=torch.float64)  # loss, right, how many
    measured = [
        (batch, logp.double().cpu(), reference.double().cpu())
        for batch, logp, reference in zip(batches, now, before, strict=True)
    ]
    if preset == "kto":
        total += _of_labelled(measured, learner)
    else:
        for batch, logp, reference in measured:
            total += _sums(batch, logp, reference, preset, learner)
        learner.engine.all_reduce_sum(total)
    loss, right, count = total.tolist()
    return EvalResult(loss / max(count, 1.0), right / max(count, 1.0))


@torch.no_grad()
def _reference(learner: Learner, batches: Sequence[MicroBatch]) -> list[Tensor]:
    found = reference_logprobs(learner.engine, learner.engine.inputs(batches))
    learner.engine.reshard()
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


def _of_labelled(measured: Sequence[tuple[MicroBatch, Tensor, Tensor]], learner: Learner) -> Tensor:
    """By rollout, whose rows may be in several micro-batches, on any rank."""
    mine: Counter[Any] = Counter()  # sums by the rollout's key and its label
    for batch, logp, reference in measured:
        keys = (batch.rollout_keys[batch.row].tolist(), batch.label[batch.row].tolist())
        for key, label, gain in zip(*keys, (logp - reference).tolist(), strict=True):
            mine[key, label] += gain
    gain_of: Counter[Any] = Counter()
    for one in learner.engine.all_gather(mine):
        gain_of.update(one)
    moved = torch.tensor([label * value for (_, label), value in gain_of.items() if label]).double()
    # Without z, which is of a training batch: the loss around 0.
    loss = torch.sigmoid(-learner.objective.beta * moved)
    return torch.stack([loss.sum(), (moved > 0).sum(), torch.tensor(len(moved))]).double()
