"""What each turn contributes to a step: how strongly, and in which direction, it is moved.

A turn's gradient is -d(loss)/d(log pi), summed over its tokens; its *gradient share* is that over
the sum of all turns' absolute values: above 0 the step makes the turn more likely, below 0 less.
It means the same for every objective, whatever its surrogate, on the weights before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tracegrad_trainer.batches import MicroBatch, Row
from tracegrad_trainer.engine import Learner
from tracegrad_trainer.engine.model.forward import (
    ModelInputs,
    TargetContext,
    forward,
    loss_tokens_of,
)
from tracegrad_trainer.engine.step.prepass import prepass
from tracegrad_trainer.engine.step.rollout_sums import with_rollout_sums
from tracegrad_trainer.losses import compute_loss
from tracegrad_trainer.losses.tokens import log_mismatch

Key = tuple[int, int]  # of a row, and of a kept turn in it


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnContribution:
    """`ratio` is the geometric mean of policy / rollout probability over the turn, at the step's
    first forward; of a demonstration, which has no rollout log-probabilities, 1."""

    turn_id: str
    rollout_id: str
    group_id: str
    index: int  # of the turn in its rollout
    reward: float
    tokens: int
    advantage: float  # mean over its tokens
    loss: float  # its part of the step's loss
    gradient_share: float  # with its sign; the absolute values of a step add up to 1
    ratio: float
    clipped: float  # share of its tokens that the surrogate holds still
    corrected: float  # share of its tokens that the mismatch correction touched
    staleness: float  # versions


def turn_contributions(
    learner: Learner,
    micro_batches: Sequence[MicroBatch],
    *,
    version: int,
    rows: Sequence[Row],
) -> list[TurnContribution]:
    """Every trained turn, on rank 0 ([] elsewhere); a collective. `rows` are rank 0's."""
    engine, objective = learner.engine, learner.objective
    inputs = engine.inputs(micro_batches)
    before = prepass(engine, objective, inputs, [TargetContext()] * len(inputs), ())
    before = with_rollout_sums(engine, objective, inputs, before)
    units = 0.0
    mine: dict[Key, dict[str, float]] = {}
    for one, known in zip(inputs, before, strict=True):
        of_turns, part = _of_micro_batch(learner, one, known, version)
        mine |= of_turns
        units += part
    engine.reshard()
    everyone = engine.all_gather((mine, units))
    if dist.get_rank() != 0:
        return []
    found = {key: values for one, _ in everyone for key, values in one.items()}
    return _named(found, sum(part for _, part in everyone), rows)


def _of_micro_batch(
    learner: Learner, inputs: ModelInputs, before: TargetContext, version: int
) -> tuple[dict[Key, dict[str, float]], float]:
    values = "value" in learner.objective.needs
    with torch.no_grad():
        now = forward(learner.model, inputs, learner.engine.head, values=values)
    logp = now.policy_logprobs.detach().requires_grad_()
    with torch.enable_grad():
        tokens = loss_tokens_of(inputs, replace(now, policy_logprobs=logp), before)
        done = compute_loss(learner.objective, tokens)
        slope = None
        if done.total.requires_grad:  # not where nothing is learnt
            [slope] = torch.autograd.grad(done.total, [logp], allow_unused=True)
    per_token = {
        "tokens": torch.ones_like(logp),
        "advantage": tokens.advantage,
        "loss": done.each_policy,
        "gradient": torch.zeros_like(logp) if slope is None else -slope,
        "log_w": log_mismatch(tokens),
        "clipped": done.clipped,
        "corrected": done.corrected,
        "staleness": torch.where(tokens.demonstration, 0, version - tokens.version),
    }
    turn = inputs.batch.turn
    sums = {
        name: np.bincount(turn, values.detach().double().cpu().numpy(), inputs.batch.turns)
        for name, values in per_token.items()
    }
    found = {
        key: {name: float(values[number]) for name, values in sums.items()}
        for number, key in enumerate(_keys(inputs.batch))
    }
    return found, float(done.units)


def _keys(batch: MicroBatch) -> list[Key]:
    """Of each turn of the micro-batch, by its number: turns are numbered row by row."""
    keys: list[Key] = []
    row_of_turn: NDArray[np.int64] = np.zeros(batch.turns, np.int64)
    row_of_turn[batch.turn] = batch.row
    for row in row_of_turn.tolist():
        key = int(batch.row_keys[row])
        before = keys[-1][1] if keys and keys[-1][0] == key else -1
        keys.append((key, before + 1))
    return keys


def _named(
    found: dict[Key, dict[str, float]], units: float, rows: Sequence[Row]
) -> list[TurnContribution]:
    total = sum(abs(values["gradient"]) for values in found.values()) or 1.0
    shares = []
    for (key, number), values in sorted(found.items()):
        row, n = rows[key], values["tokens"]
        turn_id = row.kept_turn_ids[number]
        shares.append(
            TurnContribution(
                turn_id=turn_id,
                rollout_id=row.rollout_id,
                group_id=row.group_id,
                index=row.turn_numbers[row.turn_ids.index(turn_id)],
                reward=row.score,
                tokens=int(n),
                advantage=values["advantage"] / n,
                loss=values["loss"] / max(units, 1e-9),
                gradient_share=values["gradient"] / total,
                ratio=float(np.exp(values["log_w"] / n)),
                clipped=values["clipped"] / n,
                corrected=values["corrected"] / n,
                staleness=values["staleness"] / n,
            )
        )
    return shares
