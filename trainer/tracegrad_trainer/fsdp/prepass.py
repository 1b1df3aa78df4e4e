"""What has to be known of a step's tokens before its first gradient, by forwards without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tracegrad_trainer.batches import MicroBatch
from tracegrad_trainer.objectives import ObjectiveSettings
from tracegrad_trainer.objectives.gae import gae

from .engine import Engine
from .forward import Before, Inputs, forward, to_inputs, values_of

# Advantages that all are the same have no spread to be divided by.
_EPSILON = 1e-8


@torch.no_grad()
def prepass(
    engine: Engine,
    objective: ObjectiveSettings,
    inputs: Sequence[Inputs],
    known: Sequence[Before],
    mismatched: Sequence[MicroBatch],
) -> list[Before]:
    """Of each micro-batch what is missing of it, by `ObjectiveSettings.needs`; a collective."""
    if all(one.complete for one in known):
        return list(known)
    needs = objective.needs
    if "reference" in needs:
        said = reference_logprobs(engine, inputs)
        known = [replace(k, reference=v) for k, v in zip(known, said, strict=True)]
    if "value" in needs:
        known = [_valued(engine, objective, i, k) for i, k in zip(inputs, known, strict=True)]
    if "kto_z" in needs:
        z = kto_z(engine, engine.inputs(mismatched))
        known = [replace(k, kto_z=z) for k in known]
    if objective.whiten:
        known = whiten(engine, inputs, known)
    if needs:
        engine.rest()
    return [replace(k, complete=True) for k in known]


def reference_logprobs(engine: Engine, inputs: Sequence[Inputs]) -> list[Tensor]:
    reference = engine.reference
    assert reference is not None
    model = reference.model
    # Its own arguments: it may attend, or route, in another way than the policy.
    asked = [to_inputs(one.batch, model, engine.device) for one in inputs]
    with reference.speaking():
        return [forward(model, one, reference.head).logp for one in asked]


def _valued(engine: Engine, objective: ObjectiveSettings, one: Inputs, known: Before) -> Before:
    if one.batch.subtree_end is not None:
        raise ValueError(
            "advantage = 'gae' follows a row from token to token, which branches of a tree do not:"
            " set batches.shared_prefix = 'paths'"
        )
    value = values_of(engine.model, one)
    reward = torch.from_numpy(one.batch.reward).to(value)
    row = one.tensors["row"]
    advantage, returns = gae(value, reward, row, gamma=objective.gamma, lam=objective.gae_lambda)
    return replace(known, old_value=value, returns=returns, advantage=advantage)


def kto_z(engine: Engine, inputs: Sequence[Inputs]) -> Tensor:
    """max(0, mean over mismatched rows of log pi - log reference), of all ranks (KTO, arXiv
    2402.01306). Rows that are not finite are left out; without any row it is 0."""
    theirs = reference_logprobs(engine, inputs)
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for one, reference in zip(inputs, theirs, strict=True):
        ours = forward(engine.model, one, engine.head).logp
        rows = one.tensors["row"]
        count = len(one.batch.row_lengths)
        gain = ours.new_zeros(count).index_add(0, rows, ours - reference)
        whole = torch.isfinite(gain) & (torch.bincount(rows, minlength=count) > 0)
        total += torch.stack([gain[whole].double().sum(), whole.sum().double()])
    gained, rows_counted = engine.add_up(total).unbind()
    return (gained / rows_counted.clamp(min=1)).clamp(min=0).float()


def whiten(engine: Engine, inputs: Sequence[Inputs], known: Sequence[Before]) -> list[Before]:
    """Advantages of the whole step's sampled tokens to mean 0 and variance 1.

    An expert's keep theirs: that of what is imitated must not turn negative.
    """
    given = [
        one.tensors["advantage"] if k.advantage is None else k.advantage
        for one, k in zip(inputs, known, strict=True)
    ]
    sampled = [~one.tensors["expert"] for one in inputs]
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for values, here in zip(given, sampled, strict=True):
        total += torch.stack([values[here].double().sum(), here.sum().double()])
    added, count = engine.add_up(total).unbind()
    mean = added / count.clamp(min=1)
    # Around the mean, not by the difference of two large sums.
    spread = torch.zeros((), dtype=torch.float64, device=engine.device)
    for values, here in zip(given, sampled, strict=True):
        spread += (values[here].double() - mean).square().sum()
    std = (engine.add_up(spread) / count.clamp(min=1)).sqrt()
    return [
        replace(
            k,
            advantage=torch.where(
                here, ((values.double() - mean) / (std + _EPSILON)).to(values.dtype), values
            ),
        )
        for k, values, here in zip(known, given, sampled, strict=True)
    ]
