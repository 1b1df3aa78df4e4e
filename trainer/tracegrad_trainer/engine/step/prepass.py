"""What has to be known of a step's tokens before its first gradient, by forwards without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from numpy.typing import NDArray
from torch import Tensor

from tracegrad_trainer.batches import MicroBatch
from tracegrad_trainer.engine.model.forward import (
    ModelInputs,
    TargetContext,
    forward,
    values_of,
)
from tracegrad_trainer.engine.step.rank_context import RankContext
from tracegrad_trainer.losses import ObjectiveSettings
from tracegrad_trainer.losses.gae import first_of_turns, gae, gae_of_turns

# Advantages that all are the same have no spread to be divided by.
_EPSILON = 1e-8


@torch.no_grad()
def prepass(
    engine: RankContext,
    objective: ObjectiveSettings,
    inputs: Sequence[ModelInputs],
    known: Sequence[TargetContext],
    mismatched: Sequence[MicroBatch],
) -> list[TargetContext]:
    """Of each micro-batch what is missing of it, by `ObjectiveSettings.needs`; a collective."""
    if all(one.complete for one in known):
        return list(known)
    needs = objective.needs
    if "reference" in needs:
        found = reference_logprobs(engine, inputs)
        known = [replace(k, reference_logprobs=v) for k, v in zip(known, found, strict=True)]
    if "value" in needs:
        valued = gae_by_turn if objective.gae_level == "turn" else gae_by_token
        known = valued(engine, objective, inputs, known)
    if "kto_z" in needs:
        z = kto_z(engine, engine.inputs(mismatched))
        known = [replace(k, kto_z=z) for k in known]
    if objective.whitens:
        known = whiten(engine, inputs, known)
    if needs:
        engine.reshard()
    return [replace(k, complete=True) for k in known]


def reference_logprobs(
    engine: RankContext, inputs: Sequence[ModelInputs]
) -> list[Float[Tensor, " _"]]:
    reference = engine.reference
    assert reference is not None
    model = reference.model
    # Its own arguments: it may attend, or route, in another way than the policy.
    asked = engine.inputs([one.batch for one in inputs], model)
    with reference.active():
        return [forward(model, one, reference.head).policy_logprobs for one in asked]


def gae_by_token(
    engine: RankContext,
    objective: ObjectiveSettings,
    inputs: Sequence[ModelInputs],
    known: Sequence[TargetContext],
) -> list[TargetContext]:
    """Advantages along each rollout, in the order that it sampled its tokens, whatever rows and
    micro-batches they are in; its reward is given at the last of them."""
    values = [values_of(engine.model, one) for one in inputs]
    mine = [_Targets.of(one, value) for one, value in zip(inputs, values, strict=True)]
    everyone = engine.all_gather(mine)
    every = _Targets(*(np.concatenate(each) for each in zip(*chain(*everyone), strict=True)))
    order = np.lexsort((every.place, every.row, every.turn, every.rollout))
    in_order = _Targets(*(each[order] for each in every))
    _, rollout = np.unique(in_order.rollout, return_inverse=True)
    last = np.flatnonzero(np.diff(rollout, append=-1))
    reward = in_order.reward.copy()
    reward[last] += in_order.score[last]
    found = gae(
        *map(torch.from_numpy, (in_order.value, reward, rollout)),
        gamma=objective.gamma,
        lam=objective.gae_lambda,
    )
    back = torch.from_numpy(np.argsort(order))
    rank = engine.data.rank()
    first = sum(len(one.value) for some in everyone[:rank] for one in some)
    ends = np.cumsum([first, *map(len, values)])
    advantage, returns = (
        [each[back][start:end].to(engine.device) for start, end in pairwise(ends)] for each in found
    )
    return [
        replace(k, old_value=v, advantage=a, returns=r)
        for k, v, a, r in zip(known, values, advantage, returns, strict=True)
    ]


class _Targets(NamedTuple):
    """A micro-batch's targets, for what looks at whole rollouts."""

    rollout: Int64[NDArray[np.int64], " n"]
    turn: Int64[NDArray[np.int64], " n"]
    row: Int64[NDArray[np.int64], " n"]
    place: Int64[NDArray[np.int64], " n"]
    reward: Float32[NDArray[np.float32], " n"]
    score: Float32[NDArray[np.float32], " n"]
    value: Float32[NDArray[np.float32], " n"]

    @classmethod
    def of(cls, one: ModelInputs, value: Float[Tensor, " n"]) -> _Targets:
        batch = one.batch
        return cls(
            rollout=batch.rollout_keys[batch.row],
            turn=batch.turn_number,
            row=batch.row_keys[batch.row],
            place=batch.target,
            reward=batch.reward,
            score=batch.score,
            value=value.float().cpu().numpy(),
        )


def gae_by_turn(
    engine: RankContext,
    objective: ObjectiveSettings,
    inputs: Sequence[ModelInputs],
    known: Sequence[TargetContext],
) -> list[TargetContext]:
    """Of each target its turn's value, advantage and return: over the rollout's turns in all rows,
    micro-batches and ranks; the rollout's reward is given at the last of them."""
    values = [values_of(engine.model, one).double().cpu().numpy() for one in inputs]
    first = [
        first_of_turns(torch.from_numpy(one.batch.turn), one.batch.turns).numpy() for one in inputs
    ]
    mine = [
        (
            value[at],
            np.bincount(b.turn, b.reward, b.turns),
            b.score[at],
            b.rollout_keys[b.row[at]],
            b.turn_number[at],
        )
        for value, at, b in zip(values, first, (one.batch for one in inputs), strict=True)
    ]
    everyone = engine.all_gather([np.concatenate(each) for each in zip(*mine, strict=True)])
    value, reward, score, rollout, number = (
        np.concatenate(each) for each in zip(*everyone, strict=True)
    )
    order = np.lexsort((number, rollout))
    last = order[np.flatnonzero(np.diff(rollout[order], append=-1))]
    reward[last] += score[last]
    advantage, returns = gae_of_turns(
        value, reward, rollout, number, gamma=objective.gamma, lam=objective.gae_lambda
    )
    found = torch.from_numpy(np.stack([value, advantage, returns])).float().to(engine.device)
    at = sum(len(part[0]) for part in everyone[: engine.data.rank()])
    completed = []
    for one, before in zip(inputs, known, strict=True):
        of_turns = found[:, at : at + one.batch.turns]
        at += one.batch.turns
        old_value, own, wanted = of_turns[:, one.tensors["turn"]]
        completed.append(replace(before, old_value=old_value, advantage=own, returns=wanted))
    return completed


def kto_z(engine: RankContext, inputs: Sequence[ModelInputs]) -> Float[Tensor, ""]:
    """max(0, mean over rollouts of log pi - log reference of their mismatched rows), of all ranks
    (KTO, arXiv 2402.01306). Rows that are not finite are left out; without any row it is 0."""
    theirs = reference_logprobs(engine, inputs)
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    rollouts: set[int] = set()
    for one, reference in zip(inputs, theirs, strict=True):
        ours = forward(engine.model, one, engine.head).policy_logprobs
        rows = one.tensors["row"]
        count = len(one.batch.row_lengths)
        gain = ours.new_zeros(count).index_add(0, rows, ours - reference)
        whole = torch.isfinite(gain) & (torch.bincount(rows, minlength=count) > 0)
        total += gain[whole].double().sum()
        rollouts |= set(one.batch.rollout_keys[whole.cpu().numpy()].tolist())
    counted = len(engine.gather_unique(sorted(rollouts)))
    return (engine.all_reduce_sum(total) / max(counted, 1)).clamp(min=0).float()


def whiten(
    engine: RankContext, inputs: Sequence[ModelInputs], known: Sequence[TargetContext]
) -> list[TargetContext]:
    """Advantages of the whole step's sampled tokens to mean 0 and variance 1.

    An expert's keep theirs: that of what is imitated must not turn negative.
    """
    given = [
        one.tensors["advantage"] if k.advantage is None else k.advantage
        for one, k in zip(inputs, known, strict=True)
    ]
    sampled = [~one.tensors["demonstration"] for one in inputs]
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for values, here in zip(given, sampled, strict=True):
        total += torch.stack([values[here].double().sum(), here.sum().double()])
    added, count = engine.all_reduce_sum(total).unbind()
    mean = added / count.clamp(min=1)
    # Around the mean, not by the difference of two large sums.
    spread = torch.zeros((), dtype=torch.float64, device=engine.device)
    for values, here in zip(given, sampled, strict=True):
        spread += (values[here].double() - mean).square().sum()
    std = (engine.all_reduce_sum(spread) / count.clamp(min=1)).sqrt()
    return [
        replace(
            k,
            advantage=torch.where(
                here, ((values.double() - mean) / (std + _EPSILON)).to(values.dtype), values
            ),
        )
        for k, values, here in zip(known, given, sampled, strict=True)
    ]
