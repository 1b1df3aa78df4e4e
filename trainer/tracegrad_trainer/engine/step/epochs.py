"""Several optimizer steps on one batch, all of them against the policy that it began with.

Old log-probabilities, values and the advantages made of them, the reference's word and a
mixture's routes are taken once, before the first of them. (PPO, arXiv 1707.06347.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from tracegrad_trainer.batches import MicroBatch
from tracegrad_trainer.engine.model import router_replay
from tracegrad_trainer.engine.model.forward import TargetContext, forward
from tracegrad_trainer.engine.step.accumulate import not_finite, rows_to_drop
from tracegrad_trainer.engine.step.learner import Learner, without_rows
from tracegrad_trainer.engine.step.prepass import prepass
from tracegrad_trainer.engine.step.result import StepResult, UpdateResult, result_of


@dataclass(frozen=True, slots=True)
class BatchStart:
    """A batch's micro-batches and what is known of each before the first optimizer step."""

    micro_batches: list[MicroBatch]
    before: list[TargetContext]


def train_epochs(
    learner: Learner,
    parts: Sequence[Sequence[MicroBatch]],
    *,
    epochs: int,
    version: int,
    share: float = 1.0,
) -> StepResult:
    """An optimizer step on each of the parts, as often as there are epochs.

    Every rank has as many parts, and as many micro-batches in each. `StepResult.dropped` are
    keys of rows that were in no step that changed the weights. Each counts for `share` of a step.
    """
    start = prepare_batch(learner, [batch for part in parts for batch in part])
    before = start.before
    updates: list[UpdateResult] = []
    trained: set[int] = set()
    for _ in range(epochs):
        at = 0
        for part in parts:
            here = slice(at, at := at + len(part))
            micro_batches = start.micro_batches[here]
            update = learner.update(
                micro_batches, version=version, before=before[here], share=share
            )
            before = [replace(known, current_logprobs=None) for known in before]  # it has moved
            updates.append(update)
            if update.applied:
                trained |= _keys(micro_batches) - set(update.dropped)
    every = _keys([batch for part in parts for batch in part])
    lost = learner.engine.gather_unique(sorted(every - trained))
    return result_of(updates, precision=learner.precision, dropped=lost)


def prepare_batch(learner: Learner, micro_batches: Sequence[MicroBatch]) -> BatchStart:
    """Less the rows of which some number is not finite already: what is counted over the whole
    batch must not know them."""
    start = _looked_at(learner, micro_batches)
    wrong = list(map(_wrong, start.micro_batches, start.before))
    bad = rows_to_drop(learner.engine, learner.objective, wrong, start.micro_batches)
    if not bad:
        return start
    left, _ = without_rows(bad, start.micro_batches, start.before)
    return _looked_at(learner, left)


@torch.no_grad()
def _looked_at(learner: Learner, micro_batches: Sequence[MicroBatch]) -> BatchStart:
    engine = learner.engine
    inputs = engine.inputs(micro_batches)
    with router_replay.recording_routing(engine.model) as routes:
        logp = [forward(engine.model, one, engine.head).policy_logprobs for one in inputs]
    known = [TargetContext(old_logprobs=one, current_logprobs=one) for one in logp]
    if routes:  # where none were given the routers chose: later steps replay that
        micro_batches = router_replay.with_routing(micro_batches, routes)
        inputs = engine.inputs(micro_batches)
    before = prepass(engine, learner.objective, inputs, known, ())
    engine.reshard()
    return BatchStart(list(micro_batches), before)


def _wrong(batch: MicroBatch, known: TargetContext) -> Bool[Tensor, " n"]:
    assert known.old_logprobs is not None
    rollout = torch.from_numpy(batch.rollout_logprobs).to(known.old_logprobs.device)
    return not_finite([known.old_logprobs, rollout, known.reference_logprobs, known.old_value])


def _keys(micro_batches: Sequence[MicroBatch]) -> set[int]:
    """Of rows that are no filling."""
    return {key for batch in micro_batches for key in batch.row_keys.tolist() if key >= 0}
