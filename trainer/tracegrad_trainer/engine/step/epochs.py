"""Several optimizer steps on one batch, all of them against the policy that it began with.

Old log-probabilities, values and the advantages made of them, the reference's word and a
mixture's routes are taken once, before the first of them. (PPO, arXiv 1707.06347.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tracegrad_trainer.batches import MicroBatch
from tracegrad_trainer.engine.model import router_replay
from tracegrad_trainer.engine.model.forward import Before, forward
from tracegrad_trainer.engine.step.accumulate import not_finite, rows_with
from tracegrad_trainer.engine.step.learner import Learner, without
from tracegrad_trainer.engine.step.prepass import prepass
from tracegrad_trainer.engine.step.result import StepResult, Update, result_of


@dataclass(frozen=True, slots=True)
class Start:
    """A batch's micro-batches and what is known of each before the first optimizer step."""

    micro_batches: list[MicroBatch]
    before: list[Before]


def several(
    learner: Learner, parts: Sequence[Sequence[MicroBatch]], *, epochs: int, version: int
) -> StepResult:
    """An optimizer step on each of the parts, as often as there are epochs.

    Every rank has as many parts, and as many micro-batches in each. `StepResult.dropped` are
    keys of rows that were in no step that changed the weights.
    """
    start = begin(learner, [batch for part in parts for batch in part])
    before = start.before
    updates: list[Update] = []
    trained: set[int] = set()
    for _ in range(epochs):
        at = 0
        for part in parts:
            here = slice(at, at := at + len(part))
            micro_batches = start.micro_batches[here]
            update = learner.update(micro_batches, version=version, before=before[here])
            before = [replace(known, current=None) for known in before]  # it has moved
            updates.append(update)
            if update.applied:
                trained |= _keys(micro_batches) - set(update.dropped)
    every = _keys([batch for part in parts for batch in part])
    lost = learner.engine.gather(sorted(every - trained))
    return result_of(updates, dtype=learner.engine.head.dtype, dropped=lost)


def begin(learner: Learner, micro_batches: Sequence[MicroBatch]) -> Start:
    """Less the rows of which some number is not finite already: what is counted over the whole
    batch must not know them."""
    start = _looked_at(learner, micro_batches)
    wrong = list(map(_wrong, start.micro_batches, start.before))
    bad = rows_with(learner.engine, learner.objective, wrong, start.micro_batches)
    if not bad:
        return start
    left, _ = without(bad, start.micro_batches, start.before)
    return _looked_at(learner, left)


@torch.no_grad()
def _looked_at(learner: Learner, micro_batches: Sequence[MicroBatch]) -> Start:
    engine = learner.engine
    inputs = engine.inputs(micro_batches)
    with router_replay.recording(engine.model) as routes:
        logp = [forward(engine.model, one, engine.head).logp for one in inputs]
    known = [Before(old=one, current=one) for one in logp]
    if routes:  # where none were given the routers chose: later steps replay that
        micro_batches = router_replay.routed(micro_batches, routes)
        inputs = engine.inputs(micro_batches)
    before = prepass(engine, learner.objective, inputs, known, ())
    engine.rest()
    return Start(list(micro_batches), before)


def _wrong(batch: MicroBatch, known: Before) -> torch.Tensor:
    assert known.old is not None
    mu = torch.from_numpy(batch.mu).to(known.old.device)
    return not_finite([known.old, mu, known.reference, known.old_value])


def _keys(micro_batches: Sequence[MicroBatch]) -> set[int]:
    """Of rows that are no filling."""
    return {key for batch in micro_batches for key in batch.row_keys.tolist() if key >= 0}
