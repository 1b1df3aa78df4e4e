"""Tokens of a micro-batch in float64, made by hand: what is not said is as in one whole step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracegrad_trainer.losses import ObjectiveSettings, Tokens, compute_loss
from tracegrad_trainer.losses.diagnostics import (
    diagnostic_maxima,
    diagnostic_sums,
    summarise_diagnostics,
)

# The symbols of papers, which closed forms in tests use.
FIELDS = {
    "logp": "policy_logprobs",
    "old": "old_logprobs",
    "mu": "rollout_logprobs",
    "reference": "reference_logprobs",
    "advantage": "advantage",
    "score": "score",
}


def tokens(
    logp: Sequence[float],
    old: Sequence[float] | None = None,
    mu: Sequence[float] | None = None,
    advantage: Sequence[float] | None = None,
    turn: Sequence[int] | None = None,
    row: Sequence[int] | None = None,
    rollout: Sequence[int] | None = None,
    group: Sequence[int] | None = None,
    version: Sequence[int] | None = None,
    demonstration: Sequence[bool] | None = None,
    reference: Sequence[float] | None = None,
    score: Sequence[float] | None = None,
    pair: Sequence[int] | None = None,
    label: Sequence[int] | None = None,
    **more: Any,
) -> Tokens:
    """`turn` defaults to one turn, `row` and `rollout` to one row of it, `group` to one group."""
    n = len(logp)
    turns, rows = _whole(turn, n), _whole(row, n)
    shown = torch.tensor(demonstration or [False] * n, dtype=torch.bool)
    rollouts, groups = _whole(rollout if rollout is not None else row, n), _whole(group, n)
    count = _count(rows)
    return Tokens(
        policy_logprobs=_floats(logp).requires_grad_(),
        old_logprobs=_floats(old or logp),
        rollout_logprobs=_floats(mu or old or logp),
        advantage=_floats(advantage or [1.0] * n),
        score=_floats(score or [0.0] * n),
        version=_whole(version, n, 1),
        demonstration=shown,
        turn=turns,
        row=rows,
        rollout=rollouts,
        group=groups,
        turns=_count(turns),
        rows=count,
        rollouts=_count(rollouts),
        groups=_count(groups),
        turn_tokens=_sizes(turns),
        rollout_tokens=_sizes(rollouts),
        rollout_sampled=_sizes(rollouts, ~shown),
        group_tokens=_sizes(groups),
        group_sampled=_sizes(groups, ~shown),
        pair=_whole(pair, count, -1),
        label=_whole(label, count),
        reference_logprobs=None if reference is None else _floats(reference),
        **{k: _floats(v) if isinstance(v, list | float) else v for k, v in more.items()},
    )


def _floats(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _whole(values: Sequence[int] | None, n: int, default: int = 0) -> Tensor:
    return torch.tensor([default] * n if values is None else list(values), dtype=torch.int64)


def _count(numbers: Tensor) -> int:
    return int(numbers.max()) + 1 if len(numbers) else 0


def _sizes(numbers: Tensor, counted: Tensor | None = None) -> Tensor:
    if not len(numbers):
        return _floats([])
    weights = torch.ones(len(numbers)) if counted is None else counted
    return torch.bincount(numbers, weights.double())[numbers]


def made(seed: int = 0, *, rows: int = 12, experts: bool = True, spread: float = 0.3) -> Tokens:
    """A whole step's random tokens: rollouts of some rows, rows of one to three turns, rollouts in
    pairs, and all that any objective may need.
    """
    rng = np.random.default_rng(seed)
    per_turn = [rng.integers(1, 6, rng.integers(1, 4)) for _ in range(rows)]
    rollout_of_row = np.sort(rng.integers(0, max(rows // 2, 1), rows))
    rollout_of_row = np.unique(rollout_of_row, return_inverse=True)[1]
    sizes = np.concatenate(per_turn)
    row_of_turn = np.repeat(np.arange(rows), [len(turns) for turns in per_turn])
    turn = np.repeat(np.arange(len(sizes)), sizes)
    row = row_of_turn[turn]
    rollout = rollout_of_row[row]
    n = len(turn)
    expert = (rng.random(len(sizes)) < 0.2)[turn] if experts else np.zeros(n, bool)
    logp = -rng.gamma(2.0, 1.0, n)
    old = logp + rng.normal(0, spread, n)
    mu = np.where(expert, 0.0, old + rng.normal(0, spread, n))
    order = rng.permutation(rollout_of_row.max() + 1)
    pair, label = np.where(order // 2 * 2 + 1 < len(order), order // 2, -1), 1 - 2 * (order % 2)
    pair, label = pair[rollout_of_row], label[rollout_of_row]
    old_value = rng.normal(0, 1, n)
    return tokens(
        logp.tolist(),
        old=old.tolist(),
        mu=mu.tolist(),
        advantage=rng.normal(0, 1, len(sizes))[turn].tolist(),
        turn=turn.tolist(),
        row=row.tolist(),
        rollout=rollout.tolist(),
        group=(rollout // 2).tolist(),
        version=np.where(expert, -1, rng.integers(1, 5, n)).tolist(),
        demonstration=expert.tolist(),
        score=rng.integers(-1, 2, rows)[rollout].astype(float).tolist(),
        pair=pair.tolist(),
        label=label.tolist(),
        reference=(logp + rng.normal(0, spread, n)).tolist(),
        value=_floats(old_value + rng.normal(0, 0.3, n)).requires_grad_(),
        old_value=old_value.tolist(),
        returns=rng.normal(0, 1, n).tolist(),
        kto_z=0.3,
    )


def slopes(loss: Tensor, given: Tokens) -> list[float]:
    """Its gradient by log pi."""
    (found,) = torch.autograd.grad(loss, given.policy_logprobs, retain_graph=True)
    values: list[float] = found.tolist()
    return values


def metrics_of(settings: ObjectiveSettings, *parts: Tokens, version: int = 4) -> dict[str, float]:
    """What is logged of a step of this version whose micro-batches these are."""
    added: dict[str, float] = {}
    highest: dict[str, float] = {}
    for one in parts:
        done = compute_loss(settings, one)
        for name, value in diagnostic_sums(one, done, torch.zeros(len(one)), version).items():
            added[name] = added.get(name, 0.0) + float(value)
        for name, value in diagnostic_maxima(one, done, version).items():
            highest[name] = max(highest.get(name, 0.0), float(value))
    return summarise_diagnostics(added, highest)


def part(whole: Tokens, rows: Sequence[int]) -> Tokens:
    """The tokens of some rows, as a micro-batch has them: numbered from 0, sizes of the whole step.

    Log-probabilities and values are the whole's, so that gradients add up in it.
    """
    here = torch.isin(whole.row, torch.tensor(rows))
    changed: dict[str, Any] = {}
    for name in ("turn", "row", "rollout", "group"):
        numbers = getattr(whole, name)[here]
        found, changed[name] = torch.unique(numbers, return_inverse=True)
        changed[f"{name}s"] = len(found)
    present = torch.unique(whole.row[here])
    changed |= {"pair": whole.pair[present], "label": whole.label[present]}
    for field in fields(Tokens):
        value = getattr(whole, field.name)
        if field.name not in changed and isinstance(value, Tensor) and value.ndim:
            changed[field.name] = value[here]
    return replace(whole, **changed)


def dealt(given: Tokens, ways: Sequence[int]) -> list[list[int]]:
    """The rows in micro-batches as `ways` says, those of a pair together."""
    found: dict[int, list[int]] = {}
    for row in range(given.rows):
        number = int(given.pair[row])
        way = ways[(number if number >= 0 else row) % len(ways)]
        found.setdefault(way, []).append(row)
    return list(found.values())


def micro_batches(
    settings: ObjectiveSettings, whole: Tokens, parts: Sequence[Sequence[int]]
) -> list[Tokens]:
    """The rows of `parts` as micro-batches that know what the step sums over its rollouts."""
    made = [part(whole, rows) for rows in parts]
    numbers = [torch.unique(whole.rollout[torch.isin(whole.row, torch.tensor(r))]) for r in parts]
    asked = [compute_loss(settings, one).rollout_sums for one in made]
    totals = [
        whole.rollout_logprobs.new_zeros(whole.rollouts, dtype=torch.float64) for _ in asked[0]
    ]
    for number, sums in zip(numbers, asked, strict=True):
        for total, here in zip(totals, sums, strict=True):
            total[number] += here
    return [
        replace(one, rollout_sums=[total[number] for total in totals])
        for one, number in zip(made, numbers, strict=True)
    ]
